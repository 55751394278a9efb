"""Runs what was enqueued: at once, or as late as the order permits.

A stream that is *late* runs nothing until another stream that is not, or the host, waits for an event behind it. So a
kernel of another stream that should have waited reads what was there before: poison, or the last step's values.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(slots=True)
class _Point:
    """The place of an event on its stream."""

    stream: int
    is_reached: bool = False


@dataclass(slots=True, frozen=True)
class _Item:
    """One entry of a stream: something to run, an event to wait for, or an event that is reached."""

    run: Callable[[], None] | None = None
    wait: int | None = None
    reach: int | None = None


class Queues:
    """The queues of all streams."""

    def __init__(self) -> None:
        self._late: frozenset[int] = frozenset()
        self._queues: dict[int, deque[_Item]] = defaultdict(deque)
        self._points: dict[int, _Point] = {}

    def delay(self, streams: Iterable[int]) -> None:
        """Makes these streams late, and no others, after everything that was enqueued has run."""
        self.run_all()
        self._late = frozenset(streams)

    def is_late(self, stream: int) -> bool:
        """Whether kernels of the stream run later than they are enqueued."""
        return stream in self._late

    def is_idle(self, stream: int) -> bool:
        """Whether all that was enqueued on the stream has run."""
        return not self._queues[stream]

    def is_reached(self, event: int) -> bool:
        """Whether all in front of the event has run."""
        point = self._points.get(event)
        return point is None or point.is_reached

    def add(self, stream: int, run: Callable[[], None]) -> None:
        """Enqueues something to run."""
        if self.is_late(stream):
            self._queues[stream].append(_Item(run=run))
        else:
            run()

    def record(self, stream: int, event: int) -> None:
        """Enqueues an event."""
        if self.is_late(stream):
            self._points[event] = _Point(stream)
            self._queues[stream].append(_Item(reach=event))

    def wait(self, stream: int, event: int) -> None:
        """Makes what is enqueued on a stream from now on run after an event."""
        if self.is_reached(event):
            return
        if self.is_late(stream):
            self._queues[stream].append(_Item(wait=event))
        else:
            self.run_until(event)

    def run_until(self, event: int) -> None:
        """Runs what is in front of an event."""
        point = self._points.get(event)
        while point is not None and not point.is_reached:
            self._run_next(point.stream)

    def run_stream(self, stream: int) -> None:
        """Runs all that was enqueued on a stream."""
        while self._queues[stream]:
            self._run_next(stream)

    def run_all(self) -> None:
        """Runs all that was enqueued."""
        for stream in list(self._queues):
            self.run_stream(stream)

    def _run_next(self, stream: int) -> None:
        item = self._queues[stream].popleft()
        if item.run is not None:
            item.run()
        if item.wait is not None:
            self.run_until(item.wait)
        if item.reach is not None:
            self._points[item.reach].is_reached = True
