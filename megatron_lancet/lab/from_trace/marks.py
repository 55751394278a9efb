"""Marks: where what runs on the computing thread, or on the GPU's compute stream, ends."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from megatron_lancet.schedule.timeline import Lane, Span

_US_PER_MS = 1e3


class Mark(NamedTuple):
    """The time from the mark before until this one belongs to one thing.

    Attributes:
        name: op, weight gradient, or in the wait lane message; empty for what belongs to no op.
        weight_grad: the weight gradient that this op also computes and that the host's ops don't separate.
        scaled_us: time in it that grows with the number of tokens; the rest is what each launch costs.
        core_us: time in it of the attention's core, which also grows with the number of earlier positions.
    """

    end_us: float
    name: str
    lane: Lane = Lane.COMPUTE
    weight_grad: str = ""
    scaled_us: float = 0.0
    core_us: float = 0.0


def spans_of(begin_us: float, marks: Iterable[Mark], zero_us: float) -> Iterator[Span]:
    """The spans of marks in order; neighbours of one name are one span.

    Args:
        begin_us: start of the interval that the first mark ends.
        zero_us: start of the step.
    """
    start_us, previous = begin_us, None
    for mark in marks:
        if previous is not None and (previous.name, previous.lane) != (mark.name, mark.lane):
            yield from _span(previous, start_us, zero_us)
            start_us = previous.end_us
        previous = mark
    if previous is not None:
        yield from _span(previous, start_us, zero_us)


def _span(mark: Mark, start_us: float, zero_us: float) -> Iterator[Span]:
    if mark.name:
        start_ms, end_ms = ((point - zero_us) / _US_PER_MS for point in (start_us, mark.end_us))
        yield Span(mark.name, mark.lane, start_ms, end_ms)
