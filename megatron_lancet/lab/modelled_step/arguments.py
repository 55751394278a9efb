"""The flags of a modelled step. Without torch, so that ``--help`` is there at once."""

import argparse
from pathlib import Path

from megatron_lancet.cli.arguments import positive_float
from megatron_lancet.errors import UsageError
from megatron_lancet.lab.estimate.devices import REACHED, Rate
from megatron_lancet.planning.sizes.gpus import GPUS
from megatron_lancet.testkit.mock.link import Link
from megatron_lancet.testkit.virtual_gpu.playback.device_model import DeviceModel

_LAUNCHES_US = (0.0, 2.0, 4.0, 8.0, 10.0)
_CONNECTIONS = (1, 8)
_LAYERS = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the device; all others are the launch command's."""
    default = DeviceModel()
    parser.add_argument(
        "--launch-us",
        type=float,
        nargs="+",
        default=_LAUNCHES_US,
        metavar="US",
        help="host time of a kernel's launch; 0 makes all that the host does free (default: %(default)s)",
    )
    parser.add_argument(
        "--connections",
        type=int,
        nargs="+",
        default=_CONNECTIONS,
        metavar="N",
        help="CUDA_DEVICE_MAX_CONNECTIONS: hardware queues of the GPU (default: %(default)s)",
    )
    parser.add_argument(
        "--link",
        type=Link.parse,
        default=default.link,
        metavar="LATENCY_US:GBYTES_PER_S",
        help="of each process group, for all that a rank sends to others (default: %(default)s)",
    )
    parser.add_argument(
        "--gpu",
        choices=tuple(GPUS),
        help="takes the next two from the middle of lancet estimate's ranges (default: an H100, as below)",
    )
    for name, what, value in (
        ("--tflops", "1e12 FLOP per second of matrix products", default.flops_per_s / 1e12),
        ("--memory-gbytes-per-s", "memory traffic", default.bytes_per_s / 1e9),
    ):
        parser.add_argument(name, type=positive_float, metavar="X", help=f"{what} (default: {value:g}, or from --gpu)")
    for name, what, value in (
        ("--min-kernel-us", "duration of the smallest kernel", default.min_kernel_us),
        ("--collective-us", "host time of a collective's launch", default.collective_us),
        ("--host-wait-us", "time after an event until a waiting host goes on", default.host_wait_us),
    ):
        parser.add_argument(name, type=float, default=value, metavar="X", help=f"{what} (default: {value:g})")
    for name, what in (
        ("--message-sms", "multiprocessors that a message takes from kernels"),
        ("--carveout-sms", "multiprocessors that matrix products leave free, see --lancet-comm-sms"),
    ):
        parser.add_argument(name, type=int, default=0, metavar="N", help=f"{what} (default: 0)")
    parser.add_argument(
        "--layers",
        type=int,
        default=_LAYERS,
        metavar="N",
        help=f"layers to record, an even number; deeper models are scaled from N and N / 2 (default: {_LAYERS})",
    )
    parser.add_argument(
        "--timeline",
        type=Path,
        metavar="FILE.html",
        help="also write the plan's timeline at the first --launch-us and the first --connections",
    )


def check_arguments(own: argparse.Namespace) -> None:
    """Checks the values, and sets the missing ones.

    Raises:
        UsageError: a value is out of range, or there is no folder for a file.
    """
    if own.layers < 2 or own.layers % 2:
        raise UsageError(f"--layers expects an even number of at least 2, got {own.layers}.")
    if min(own.connections) < 1:
        raise UsageError(f"--connections expects numbers of at least 1, got {min(own.connections)}.")
    numbers = [("--launch-us", number) for number in own.launch_us]
    numbers += [("--min-kernel-us", own.min_kernel_us), ("--collective-us", own.collective_us)]
    for name, number in (*numbers, ("--host-wait-us", own.host_wait_us)):
        if not 0 <= number < float("inf"):
            raise UsageError(f"{name} expects a finite number of at least 0, got {number:g}.")
    default = DeviceModel()
    for name, number in (("--message-sms", own.message_sms), ("--carveout-sms", own.carveout_sms)):
        if not 0 <= number < default.num_sms:
            raise UsageError(f"{name} expects 0 to {default.num_sms - 1}, got {number}.")
    gpu = GPUS.get(own.gpu)
    if own.tflops is None:
        rate = default.flops_per_s if gpu is None else gpu.flops_per_s * REACHED[Rate.PRODUCT].middle
        own.tflops = rate / 1e12
    if own.memory_gbytes_per_s is None:
        rate = default.bytes_per_s if gpu is None else gpu.bytes_per_s * REACHED[Rate.NONE].middle
        own.memory_gbytes_per_s = rate / 1e9
    if own.timeline is not None and not own.timeline.parent.is_dir():
        raise UsageError(f"--timeline {own.timeline}: there is no folder {own.timeline.parent}.")
