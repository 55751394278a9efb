"""Distributes overlapping spans over levels."""

import heapq
from collections.abc import Sequence

from megatron_lancet.schedule.ops import Op, Phase
from megatron_lancet.schedule.timeline import Span


def message_levels(messages: Sequence[Span]) -> list[int]:
    """Returns the level of each message, [num_messages]; on none of them messages overlap.

    If messages of a backward are in flight beside those of the forward of another micro-batch, they have levels of
    their own, below those of forwards.

    Args:
        messages: spans ordered by start.
    """
    is_backward = [_is_backward(message) for message in messages]
    forwards, backwards = (
        [m for m, own in zip(messages, is_backward, strict=True) if own is side] for side in (False, True)
    )
    if not _overlap(forwards, backwards):
        return levels(messages)
    of_forwards, of_backwards = levels(forwards), levels(backwards)
    first = max(of_forwards) + 1
    next_forward, next_backward = iter(of_forwards), iter(of_backwards)
    return [first + next(next_backward) if own else next(next_forward) for own in is_backward]


def levels(spans: Sequence[Span]) -> list[int]:
    """Returns the lowest level, from 0, on which each span overlaps no earlier one: [num_spans].

    This takes no more levels than there are spans at one time.

    Args:
        spans: spans ordered by start.
    """
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    chosen = []
    for span in spans:
        while busy and busy[0][0] <= span.start_ms:
            heapq.heappush(free, heapq.heappop(busy)[1])
        level = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (span.end_ms, level))
        chosen.append(level)
    return chosen


def _is_backward(message: Span) -> bool:
    op = Op.find(message.name)
    return op is not None and op.phase is Phase.INPUT_GRAD


def _overlap(first: Sequence[Span], second: Sequence[Span]) -> bool:
    """Whether a span of the one overlaps a span of the other; both are ordered by start."""
    ordered = sorted([(span.start_ms, span.end_ms, own) for own, spans in enumerate((first, second)) for span in spans])
    end_ms = [float("-inf"), float("-inf")]
    for start_ms, own_end_ms, own in ordered:
        if start_ms < end_ms[1 - own]:
            return True
        end_ms[own] = max(end_ms[own], own_end_ms)
    return False
