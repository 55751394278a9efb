"""Measures how much slower compute is while a message is in flight, with kernels of the model's own size.

A message takes multiprocessors (cores, on the CPU) from a GEMM, and bandwidth of the memory from a kernel that moves
rows, so both kinds are measured. On CUDA all kernels of a measurement are enqueued before the first of them runs:
otherwise small ones would measure how fast the host launches, with and without a message.
"""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from megatron_lancet.runtime.collectives import from_all_ranks
from megatron_lancet.runtime.comm_stats import EventPair
from megatron_lancet.runtime.transport.base import Transfer

_REPEATS = 7
_MAX_KERNELS = 64
_SHARE_OF_MESSAGE = 0.8
"""The kernels together take this part of a message's time, so that all of them run while it is in flight."""
_MIN_KERNELS = 4
_MIN_ROWS = 64
_MAX_BYTES = 64 << 20
"""Largest tensor of a kernel: a training run has little memory to spare, and no cache holds as much."""
_KERNEL_LAUNCH_MS, _MESSAGE_LAUNCH_MS = 0.02, 0.2
"""Upper estimates of the host's time, for the number of kernels that keep the device busy meanwhile."""

Kernel = Callable[[], object]


@dataclass(frozen=True)
class ChunkSizes:
    """Sizes of a chunk's ops on this rank.

    Attributes:
        tokens: tokens of a chunk, T.
        topk: experts of a token; T * topk rows are moved.
        hidden: elements of a token.
        ffn: width of an expert's first linear layer.
        dtype: type of the activations.
    """

    tokens: int
    topk: int
    hidden: int
    ffn: int
    dtype: torch.dtype


def gemm(sizes: ChunkSizes, rows: int, device: torch.device) -> Kernel:
    """Returns an expert's first linear layer, [rows, hidden] by [hidden, ffn]."""
    input_RI = torch.randn(rows, sizes.hidden, device=device, dtype=sizes.dtype)
    weight_IO = torch.randn(sizes.hidden, sizes.ffn, device=device, dtype=sizes.dtype)
    output_RO = input_RI.new_empty(rows, sizes.ffn)
    return lambda: torch.mm(input_RI, weight_IO, out=output_RO)


def copy(sizes: ChunkSizes, rows: int, device: torch.device) -> Kernel:
    """Returns a copy of rows, [rows, hidden], as a permutation makes it."""
    rows_RH = torch.randn(rows, sizes.hidden, device=device, dtype=sizes.dtype)
    copied_RH = torch.empty_like(rows_RH)
    return lambda: copied_RH.copy_(rows_RH)


def measure_slowdowns(
    sizes: ChunkSizes, start: Callable[[], Transfer], message_ms: float, device: torch.device
) -> tuple[float, float]:
    """Returns the slowdowns of GEMMs and of copies, each at least 1. Collective over the world.

    Args:
        start: launches a message between all ranks.
        message_ms: time of that message.
    """
    most = _MAX_BYTES // sizes.dtype.itemsize
    sizes = replace(sizes, ffn=max(1, min(sizes.ffn, most // sizes.hidden)))
    rows = min(sizes.tokens, most // max(sizes.hidden, sizes.ffn))
    computes = _fitting(lambda rows: gemm(sizes, rows, device), rows, message_ms, device)
    rows = min(sizes.tokens * sizes.topk, most // sizes.hidden)
    moves = _fitting(lambda rows: copy(sizes, rows, device), rows, message_ms, device)
    return _slowdown(computes, start, message_ms, device), _slowdown(moves, start, message_ms, device)


def _fitting(kernel_of: Callable[[int], Kernel], rows: int, message_ms: float, device: torch.device) -> Kernel:
    """Returns the kernel with as many of the rows as let it run several times during a message."""
    while True:
        kernel = kernel_of(rows)
        if rows <= _MIN_ROWS or _mean_ms(kernel, device) * _MIN_KERNELS <= _SHARE_OF_MESSAGE * message_ms:
            return kernel
        rows = max(_MIN_ROWS, rows // 2)


def _slowdown(kernel: Kernel, start: Callable[[], Transfer], message_ms: float, device: torch.device) -> float:
    """Returns the median over ranks and repeats of the kernel's time during a message divided by its time alone."""
    mean_ms = max(_mean_ms(kernel, device), 1e-6)
    number = max(1, min(_MAX_KERNELS, int(_SHARE_OF_MESSAGE * message_ms / mean_ms)))
    factors = []
    for _ in range(_REPEATS):
        alone_ms, _ = _kernels_ms(kernel, number, mean_ms, device)
        dist.barrier()
        beside_ms, transfer = _kernels_ms(kernel, number, mean_ms, device, start)
        factors.append(beside_ms / alone_ms)
        assert transfer is not None
        transfer.wait()
    return max(1.0, statistics.median(from_all_ranks(statistics.median(factors))))


def _mean_ms(kernel: Kernel, device: torch.device) -> float:
    kernel()
    return _kernels_ms(kernel, _MIN_KERNELS, 1.0, device)[0] / _MIN_KERNELS


def _kernels_ms(
    kernel: Kernel, number: int, mean_ms: float, device: torch.device, start: Callable[[], Transfer] | None = None
) -> tuple[float, Transfer | None]:
    """Returns the time of ``number`` kernels behind each other, and the message that was started with the first."""
    if device.type == "cuda":
        ahead_ms = _MESSAGE_LAUNCH_MS + _KERNEL_LAUNCH_MS * number
        for _ in range(min(_MAX_KERNELS, math.ceil(ahead_ms / mean_ms))):
            kernel()
    # The message waits for the kernels ahead of it, so it starts with the first one that is timed.
    transfer = start() if start is not None else None
    return timed_ms(lambda: [kernel() for _ in range(number)], device), transfer


def timed_ms(work: Callable[[], object], device: torch.device) -> float:
    """Returns the time of ``work`` on the host, or of what it enqueues on a CUDA device."""
    if device.type != "cuda":
        start_s = time.perf_counter()
        work()
        return (time.perf_counter() - start_s) * 1e3
    pair = EventPair()
    work()
    pair.end.record()
    pair.end.synchronize()
    return pair.elapsed_ms()
