"""Which of two accesses happens before the other: vector clocks of streams, events and the host.

A clock has the last kernel of each stream that has ended by then. The host is one more stream: what it enqueues comes
after all that it has waited for. ``torch.cuda._sanitizer`` has such clocks too, but its import alone lets torch call
Python at each allocation and event of a device.
"""

type _Clock = dict[int, int]
"""Number of the last kernel of each stream; a stream that is missing has none."""

HOST = -1
"""Number of the host among streams."""


class Order:
    """The order that a GPU must keep.

    Attributes:
        num_kernels: kernels that were enqueued so far, on all streams and on the host.
    """

    def __init__(self) -> None:
        self._host: _Clock = {}
        self._streams: dict[int, _Clock] = {}
        self._events: dict[int, _Clock] = {}
        self.num_kernels = 0

    def add_stream(self, stream: int) -> None:
        """Adds a stream, which starts behind all that the host has waited for."""
        self._streams.setdefault(stream, {**self._host})

    def add_kernel(self, stream: int) -> int:
        """Enqueues a kernel, or runs it where ``stream`` is the host; returns its number."""
        self.num_kernels += 1
        if stream != HOST:
            self._clock(stream)[stream] = self.num_kernels
        return self.num_kernels

    def record(self, event: int, stream: int) -> None:
        """Records an event behind all that the stream has got so far."""
        self._events[event] = {**self._clock(stream)}

    def wait(self, stream: int, event: int) -> None:
        """Makes a stream wait for an event."""
        _advance(self._clock(stream), self._events.get(event, {}))

    def host_waits_for_event(self, event: int) -> None:
        """Makes the host wait; all that it enqueues from now on comes later."""
        self._host_waits(self._events.get(event, {}))

    def host_has_passed(self, event: int) -> bool:
        """Whether the host has waited for all that is in front of an event."""
        return all(self._host.get(stream, 0) >= kernel for stream, kernel in self._events[event].items())

    def host_waits_for_stream(self, stream: int) -> None:
        """Makes the host wait for all that a stream has got so far."""
        self._host_waits({**self._clock(stream)})

    def host_waits_for_all(self) -> None:
        """Makes the host wait for all streams."""
        self._host_waits({stream: clock.get(stream, 0) for stream, clock in self._streams.items()})

    def is_before(self, other: int, kernel: int, stream: int) -> bool:
        """Whether what ``stream`` enqueues now runs after the kernel with this number on stream ``other``."""
        if other in (stream, HOST):
            return True
        clock = self._host if stream == HOST else self._clock(stream)
        return clock.get(other, 0) >= kernel

    def _clock(self, stream: int) -> _Clock:
        self.add_stream(stream)
        return self._streams[stream]

    def _host_waits(self, passed: _Clock) -> None:
        """All that the host enqueues from now on, on any stream, comes after these kernels."""
        for clock in (self._host, *self._streams.values()):
            _advance(clock, passed)


def _advance(clock: _Clock, passed: _Clock) -> None:
    for stream, kernel in passed.items():
        clock[stream] = max(clock.get(stream, 0), kernel)
