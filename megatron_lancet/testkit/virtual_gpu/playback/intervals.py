"""Intervals of simulated time."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Interval(NamedTuple):
    """A time in microseconds since the start of the log."""

    start_us: float
    end_us: float

    @property
    def us(self) -> float:
        """Duration."""
        return self.end_us - self.start_us


class IntervalsInOrder:
    """Intervals of one stream, in order of time."""

    def __init__(self) -> None:
        self._all: list[Interval] = []
        self._ends_us: list[float] = []

    def add(self, one: Interval) -> None:
        self._all.append(one)
        self._ends_us.append(one.end_us)

    def at(self, time_us: float) -> Interval | None:
        """The interval that contains a time, or None."""
        place = bisect_right(self._ends_us, time_us)
        found = self._all[place] if place < len(self._all) else None
        return found if found is not None and found.start_us <= time_us else None


def union_of(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time as intervals that do not overlap, by start."""
    merged: list[Interval] = []
    for one in sorted(intervals):
        if merged and one.start_us <= merged[-1].end_us:
            merged[-1] = Interval(merged[-1].start_us, max(merged[-1].end_us, one.end_us))
        else:
            merged.append(one)
    return merged


def overlap_us(intervals: Sequence[Interval], union: Sequence[Interval]) -> float:
    """Time that both have in common; neither has intervals that overlap each other."""
    total_us, first = 0.0, 0
    for one in sorted(intervals):
        while first < len(union) and union[first].end_us <= one.start_us:
            first += 1
        for other in union[first:]:
            if other.start_us >= one.end_us:
                break
            total_us += min(one.end_us, other.end_us) - max(one.start_us, other.start_us)
    return total_us
