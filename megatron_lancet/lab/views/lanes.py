"""Distributes overlapping spans over levels, the messages of each wire over levels of its own."""

import heapq
from collections.abc import Sequence

from megatron_lancet.schedule.ops import BETWEEN_NODES, INSIDE_NODE, Op, Phase
from megatron_lancet.schedule.timeline import Span

_ALL_RANKS, _BETWEEN_NODES, _INSIDE_NODE = "communication", "between nodes", "inside a node"
"""Lanes of messages, from the top: of an expert-parallel group, and of each of two hops."""


def message_rows(messages: Sequence[Span]) -> tuple[list[int], list[str]]:
    """Returns the row of each message, [num_messages], and a title for each row, from the top.

    On no row messages overlap. Those between nodes and those inside a node, which two hops have, are on rows of their
    own; so are within each of these the messages of forwards and of backwards, if both are in flight at a time.

    Args:
        messages: spans ordered by start.
    """
    wires = [_wire(message) for message in messages]
    row_of = [0] * len(messages)
    titles: list[str] = []
    for wire in (_ALL_RANKS, _BETWEEN_NODES, _INSIDE_NODE):
        own = [index for index, other in enumerate(wires) if other == wire]
        levels_of_own = message_levels([messages[index] for index in own])
        for index, level in zip(own, levels_of_own, strict=True):
            row_of[index] = len(titles) + level
        titles += [f"{wire} {level + 1}" if level else wire for level in range(max(levels_of_own, default=-1) + 1)]
    return row_of, titles


def message_levels(messages: Sequence[Span]) -> list[int]:
    """Returns the level of each message, [num_messages]; on none of them messages overlap.

    If messages of a backward are in flight together with messages of another micro-batch's forward, they have levels of
    their own, below the forward's levels.

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


def _wire(message: Span) -> str:
    op = Op.find(message.name)
    if op is None:
        return _ALL_RANKS
    return _BETWEEN_NODES if op.kind in BETWEEN_NODES else _INSIDE_NODE if op.kind in INSIDE_NODE else _ALL_RANKS


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
