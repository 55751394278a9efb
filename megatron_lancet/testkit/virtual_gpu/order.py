"""Which of two accesses happens before the other: vector clocks of streams, events and the host.

The clocks are ``torch.cuda._sanitizer``'s, a class in plain Python. The host counts as one more stream: what it
enqueues comes after all that it has waited for.
"""

from torch.cuda._sanitizer import StreamSynchronizations

HOST = -1
"""Number of the host among streams."""


class Order:
    """The order that a GPU must keep.

    Attributes:
        num_kernels: kernels that were enqueued so far, on all streams and on the host.
    """

    def __init__(self) -> None:
        self._clocks = StreamSynchronizations()
        self.num_kernels = 0

    def add_stream(self, stream: int) -> None:
        """Adds a stream, which starts behind all that the host has waited for."""
        self._clocks.create_stream(stream)

    def add_kernel(self, stream: int) -> int:
        """Enqueues a kernel, or runs it where ``stream`` is the host; returns its number."""
        self.num_kernels += 1
        if stream != HOST:
            self._clocks.update_seq_num(stream, self.num_kernels)
        return self.num_kernels

    def record(self, event: int, stream: int) -> None:
        """Records an event behind all that the stream has got so far."""
        self._clocks.create_event(event)
        self._clocks.record_state(event, stream)

    def wait(self, stream: int, event: int) -> None:
        """Makes a stream wait for an event."""
        self._clocks.stream_wait_for_event(stream, event)

    def host_waits_for_event(self, event: int) -> None:
        """Makes the host wait; all that it enqueues from now on comes later."""
        self._clocks.all_streams_wait_for_event(event)

    def host_has_passed(self, event: int) -> bool:
        """Whether the host has waited for all that is in front of an event."""
        passed = self._clocks.host_sync_state
        return all(
            passed.get(stream, 0) >= kernel for stream, kernel in self._clocks.recorded_sync_states[event].items()
        )

    def host_waits_for_stream(self, stream: int) -> None:
        """Makes the host wait for all that a stream has got so far."""
        self._clocks.all_streams_wait_for_stream(stream)

    def host_waits_for_all(self) -> None:
        """Makes the host wait for all streams."""
        self._clocks.sync_all_streams()

    def is_before(self, other: int, kernel: int, stream: int) -> bool:
        """Whether what ``stream`` enqueues now runs after the kernel with this number on stream ``other``."""
        if other in (stream, HOST):
            return True
        if stream == HOST:
            return self._clocks.host_sync_state.get(other, 0) >= kernel
        return self._clocks.is_ordered_after(stream, kernel, other)
