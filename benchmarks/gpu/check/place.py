"""Where a part of the check runs: a CUDA device, or the virtual GPU with a clock that counts kernels."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_lancet.patching import replaced
from megatron_lancet.testkit.virtual_gpu.device import VirtualGpu
from megatron_lancet.testkit.virtual_gpu.link import virtual_link
from megatron_lancet.testkit.virtual_gpu.log import Kernel
from megatron_lancet.testkit.virtual_gpu.megatron import virtual_gpu_platform
from megatron_lancet.testkit.virtual_gpu.streams import VirtualEvent, VirtualStream
from megatron_lancet.training.platform.cpu import cpu_platform

_KERNEL_MS = 1e-3
"""What a kernel takes by the clock of a rehearsal."""


class MissingOrderError(RuntimeError):
    """The virtual GPU found accesses without an order between them."""


@dataclass(frozen=True)
class Place:
    """Where a part runs.

    Attributes:
        device: the device of all tensors; also in a rehearsal ``cuda``.
        gpu: the virtual GPU of a rehearsal; None on a device.
    """

    device: torch.device
    gpu: VirtualGpu | None = None

    @property
    def is_rehearsal(self) -> bool:
        """Whether this is the virtual GPU: models are small, and times mean nothing."""
        return self.gpu is not None

    @property
    def name(self) -> str:
        """Name of the device for readers."""
        return "virtual GPU" if self.is_rehearsal else torch.cuda.get_device_name(self.device)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Runs a step: at the end of the context all of its kernels have run.

        Raises:
            MissingOrderError: on the virtual GPU, an order between two accesses is missing.
        """
        if self.gpu is None:
            yield
            torch.cuda.synchronize(self.device)
            return
        with self.gpu.watch():
            yield
        if self.gpu.problems:
            raise MissingOrderError("\n".join(problem.text for problem in self.gpu.problems))


@contextmanager
def on_device() -> Iterator[Place]:
    """Inside the context a part runs on the first CUDA device. Functions that Megatron compiles run as they are."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    with torch.compiler.set_stance("force_eager"):  # compiling takes longer than a part may
        yield Place(device)


@contextmanager
def rehearsal() -> Iterator[Place]:
    """Inside the context a part runs on the virtual GPU, and a kernel takes a microsecond."""
    with cpu_platform(), virtual_gpu_platform() as gpu, ExitStack() as stack:
        stack.enter_context(virtual_link(gpu))
        stack.enter_context(counting_clock(gpu))
        yield Place(torch.device("cuda"), gpu)


@contextmanager
def counting_clock(gpu: VirtualGpu) -> Iterator[None]:
    """Inside the context the time between two events is a microsecond for each kernel that was enqueued between them.

    The profiler's trace has these kernels, one after the other.
    """
    times: dict[VirtualEvent, int] = {}

    def record(event: VirtualEvent, stream: VirtualStream | None = None) -> None:
        times[event] = gpu.order.num_kernels
        VirtualEvent.record(event, stream)

    def elapsed_time(event: VirtualEvent, other: VirtualEvent) -> float:
        VirtualEvent.elapsed_time(event, other)  # as on CUDA, both must have been reached
        return (times[other] - times[event] + 1) * _KERNEL_MS

    with (
        replaced(gpu.Event, "record", record),
        replaced(gpu.Event, "elapsed_time", elapsed_time),
        replaced(torch.profiler, "profile", lambda **_: VirtualProfile(gpu)),
    ):
        yield


class VirtualProfile:
    """In place of torch.profiler on the virtual GPU: a kernel a microsecond, one after the other."""

    def __init__(self, gpu: VirtualGpu) -> None:
        self._gpu = gpu

    def __enter__(self) -> "VirtualProfile":
        self._watch = nullcontext() if self._gpu.is_watching else self._gpu.watch()
        self._watch.__enter__()
        return self

    def __exit__(self, *error: Any) -> bool | None:
        return self._watch.__exit__(*error)

    def export_chrome_trace(self, path: str) -> None:
        """Writes the kernels of the log in the format of torch.profiler."""
        kernels = [entry for entry in self._gpu.log if isinstance(entry, Kernel)]
        events = [
            {"ph": "X", "cat": "kernel", "name": kernel.name, "ts": at, "dur": 1, "args": {"stream": kernel.stream}}
            for at, kernel in enumerate(kernels)
        ]
        Path(path).write_text(json.dumps({"traceEvents": events}))
