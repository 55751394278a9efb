"""The log of a traced step: entries of the thread that computes, and the spans computed from them."""

import os
import threading
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from enum import Enum, auto
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from megatron_lancet.schedule.timeline import Lane, Span

_OVERHEAD_MS = 0.05
"""A shorter time between an op's end and a wait is autograd's own work and counts for the op. A shorter time before a
weight gradient is the store's own work and counts for the weight gradient, unless a hand-over is in that time."""
_BLOCKED_MS = 0.2
"""A thread that neither runs nor waits for a core for a shorter time is not noted."""
_SCHEDSTAT = Path("/proc/thread-self/schedstat")


class What(Enum):
    """Meaning of a log entry for the time before or after it."""

    END = auto()
    """An op ends."""
    SKIP = auto()
    """The time before belongs to no op."""
    CUT = auto()
    """A wait or a weight gradient begins."""
    RESUME = auto()
    """The wait or weight gradient ends."""
    LEAVE = auto()
    """The forward paired with this backward, or the backward paired with this forward, runs from here on."""
    RETURN = auto()
    """This one runs again."""


class Busy(NamedTuple):
    """Seconds for which a thread has run or waited for a core; each thread counts from a start of its own."""

    thread: int
    seconds: float


class Entry(NamedTuple):
    """An entry of the log; ``lane`` is the lane of a wait or weight gradient.

    ``busy`` is the busy time of the thread that made it, None where it is not known; on CUDA the host's clock.
    """

    what: What
    name: str
    point: Any
    lane: Lane = Lane.COMPUTE
    busy: Busy | None = None


class Blocked(NamedTuple):
    """A part of the step in which the thread that computes was blocked: neither running nor waiting for a core.

    Attributes:
        start_ms: start of the part, in which no op begins or ends.
        end_ms: the same for its end.
        ms: how much of it.
    """

    start_ms: float
    end_ms: float
    ms: float


class BusyClock:
    """Measures how long the calling thread has run or waited for a core, with the statistics of Linux's scheduler.

    The rest of the time the thread slept: in a lock, a read from a disk, a ``sleep``. A rank whose core does other work
    is not blocked; it waits for the core.
    """

    def __init__(self) -> None:
        self._of_thread = threading.local()

    def now(self) -> Busy | None:
        """The calling thread's time; None on systems without these statistics."""
        try:
            figures: _Schedstat = self._of_thread.figures
        except AttributeError:
            if not _SCHEDSTAT.exists():
                return None
            figures = self._of_thread.figures = _Schedstat()
        return Busy(threading.get_ident(), time.thread_time() + figures.waited_s())


class _Schedstat:
    """The scheduler's statistics of the thread that creates the object, which keeps their file open."""

    def __init__(self) -> None:
        self._file = os.open(_SCHEDSTAT, os.O_RDONLY)

    def waited_s(self) -> float:
        """How long the thread was ready to run and had no core."""
        return int(os.pread(self._file, 128, 0).split()[1]) / 1e9

    def __del__(self) -> None:
        os.close(self._file)


def spans_of(log: Sequence[Entry]) -> list[Span]:
    """Returns the spans of the computing thread, by start; points of the log are milliseconds.

    An op has a span for each part into which waits, weight gradients and hand-overs cut it. Time after the last entry
    belongs to no op. A log that begins with a return begins there.
    """
    away = _Away(log)
    spans: list[Span] = []
    parts: list[tuple[float, float]] = []
    open_ms = cut_ms = 0.0
    for what, name, point_ms, lane, _ in log:
        if what in (What.LEAVE, What.RETURN):
            continue
        if what is What.END:
            parts.append((open_ms, point_ms))
            if spans and spans[-1].name == name and spans[-1].end_ms == parts[0][0]:
                parts[0] = (spans.pop().start_ms, parts[0][1])  # the op's end was reported in two steps
            spans += [Span(name, Lane.COMPUTE, *part) for part in parts]
        elif what is What.CUT:
            cut_ms = point_ms
            away_ms = away.within_ms(open_ms, point_ms)
            if point_ms - open_ms - away_ms >= _OVERHEAD_MS or (away_ms and lane is Lane.COMPUTE):
                parts.append((open_ms, point_ms))
            elif lane is Lane.COMPUTE:
                cut_ms = open_ms
            elif spans and spans[-1].end_ms == open_ms:
                spans[-1] = replace(spans[-1], end_ms=point_ms)
            continue
        elif what is What.RESUME:
            spans.append(Span(name, lane, cut_ms, point_ms))
            open_ms = point_ms
            continue
        parts, open_ms = [], point_ms
    pieces = [piece for span in spans for piece in away.pieces_of(span)]
    return sorted(pieces, key=lambda span: (span.start_ms, span.end_ms))


def blocked_in(log: Sequence[Entry]) -> Iterator[Blocked]:
    """Yields where the thread of a log was blocked, outside of waits for messages; points of the log are seconds."""
    for before, after in pairwise(log):
        is_elsewhere = after.what is What.RETURN or (after.what is What.RESUME and after.lane is Lane.WAIT)
        if is_elsewhere or before.busy is None or after.busy is None or before.busy.thread != after.busy.thread:
            continue
        blocked_ms = (after.point - before.point - (after.busy.seconds - before.busy.seconds)) * 1e3
        if blocked_ms > _BLOCKED_MS:
            yield Blocked(before.point * 1e3, after.point * 1e3, blocked_ms)


class _Away:
    """The times of a log in which the other of a forward and a backward ran."""

    def __init__(self, log: Sequence[Entry]) -> None:
        self._left_ms: list[float] = []
        self._back_ms: list[float] = []
        left_ms = 0.0
        for what, _, point_ms, _, _ in log:
            if what is What.LEAVE:
                left_ms = point_ms
            elif what is What.RETURN:
                self._left_ms.append(left_ms)
                self._back_ms.append(point_ms)

    def within_ms(self, start_ms: float, end_ms: float) -> float:
        """Time away between two points at which this one ran."""
        return sum(back_ms - left_ms for left_ms, back_ms in self._between(start_ms, end_ms))

    def pieces_of(self, span: Span) -> list[Span]:
        """Returns the parts of a span in which this one ran; the span begins and ends in such times."""
        begins, ends = [span.start_ms], []
        for left_ms, back_ms in self._between(span.start_ms, span.end_ms):
            ends.append(left_ms)
            begins.append(back_ms)
        ends.append(span.end_ms)
        pieces = [replace(span, start_ms=a, end_ms=b) for a, b in zip(begins, ends, strict=True) if a < b]
        return pieces or [replace(span, end_ms=span.start_ms)]

    def _between(self, start_ms: float, end_ms: float) -> Iterator[tuple[float, float]]:
        index = bisect_right(self._back_ms, start_ms)
        while index < len(self._left_ms) and self._left_ms[index] < end_ms:
            yield self._left_ms[index], self._back_ms[index]
            index += 1
