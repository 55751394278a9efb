"""Stand-ins for ``torch.cuda.Stream``, ``torch.cuda.Event`` and ``torch.cuda.stream``."""

import itertools
from typing import TYPE_CHECKING, Any, ClassVar

import torch

if TYPE_CHECKING:
    from megatron_lancet.testkit.virtual_gpu.device import VirtualGpu

LOWEST_PRIORITY, HIGHEST_PRIORITY = 0, -5
"""As on an H100."""


class VirtualStream:
    """A stream of a :class:`VirtualGpu`."""

    gpu: ClassVar["VirtualGpu"]

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.id = self.cuda_stream = self.gpu.add_stream(self)
        # As torch does: priorities out of range are clamped.
        self.priority = min(LOWEST_PRIORITY, max(HIGHEST_PRIORITY, priority))
        self.device = torch.device("cpu")
        self.name = f"stream {self.id}"

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return LOWEST_PRIORITY, HIGHEST_PRIORITY

    def wait_event(self, event: "VirtualEvent") -> None:
        event.wait(self)

    def wait_stream(self, stream: "VirtualStream") -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: "VirtualEvent | None" = None) -> "VirtualEvent":
        event = event or self.gpu.Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.gpu.host_waits_for_stream(self.id, "stream")

    def query(self) -> bool:
        return self.gpu.queues.is_idle(self.id)


class VirtualEvent:
    """An event; recorded again it is another one."""

    gpu: ClassVar["VirtualGpu"]
    _numbers = itertools.count(1)

    def __init__(self, *_: Any, **__: Any) -> None:
        self.number: int | None = None

    def record(self, stream: VirtualStream | None = None) -> None:
        self.number = next(self._numbers)
        self.gpu.record(self.number, (stream or self.gpu.current_stream()).id)

    def wait(self, stream: VirtualStream | None = None) -> None:
        if self.number is not None:  # an event that was never recorded has been reached
            self.gpu.stream_waits((stream or self.gpu.current_stream()).id, self.number)

    def synchronize(self) -> None:
        if self.number is not None:
            self.gpu.host_waits_for_event(self.number)

    def query(self) -> bool:
        """Whether the event has been reached; what the host enqueues afterwards is then ordered behind it."""
        return self.number is None or self.gpu.host_sees(self.number)

    def elapsed_time(self, other: "VirtualEvent") -> float:
        """Nothing takes time here; times come from the log, see ``playback``.

        Raises:
            RuntimeError: an event was not recorded, or the host does not know that it was reached; as on CUDA.
        """
        for event in (self, other):
            if event.number is None:
                raise RuntimeError("both events must be recorded before the time between them is asked for")
            if not self.gpu.order.host_has_passed(event.number):
                raise RuntimeError("the host has not waited for an event whose time it asks for")
        return 0.0


class CurrentStream:
    """Context in which a stream is current on this thread, as ``torch.cuda.stream``."""

    gpu: ClassVar["VirtualGpu"]

    def __init__(self, stream: VirtualStream | None) -> None:
        self.stream = stream

    def __enter__(self) -> VirtualStream | None:
        self._before = self.gpu.current_stream()
        if self.stream is not None:
            self.gpu.set_current_stream(self.stream)
        return self.stream

    def __exit__(self, *_: Any) -> None:
        self.gpu.set_current_stream(self._before)
