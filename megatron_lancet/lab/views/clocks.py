"""Aligns the clocks of ranks, so that the two ends of a message agree.

Each rank reads its own clock. They are related because no rank receives a message before all its senders have sent it:
if rank a launches a collective at ``start_a`` and rank b has it at ``end_b``, then corrections c of the clocks satisfy

    start_a + c_a <= end_b + c_b        for all pairs of its ranks.

A message of two hops is a collective of the ranks that it connects: ranks with one place on each node, or ranks of one
node.

Over all collectives of a step the smallest ``end_b - start_a`` bounds ``c_a - c_b`` from above, and the smallest
``end_a - start_b`` from below. As in NTP the correction is the middle of the two: its error is half the difference of
the two smallest latencies. With more than two ranks the bounds are first tightened along paths, and each rank in turn
is the reference; every such solution meets all bounds, and so does their mean.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron_lancet.schedule.ops import BETWEEN_NODES, INSIDE_NODE, Op, OpKind
from megatron_lancet.schedule.timeline import Lane, RankTimeline, Span


def aligned(
    timelines: Sequence[RankTimeline], groups: Sequence[Sequence[int]] = (), ranks_per_node: int | None = None
) -> tuple[RankTimeline, ...]:
    """Returns the timelines on one clock.

    Ranks that share no message, directly or through others, can't be related: each such set of ranks is aligned
    separately. In each set the earliest span keeps its time; a single rank is unchanged.

    Args:
        timelines: one timeline of the step per rank, each on the rank's own clock.
        groups: ranks that exchange messages with each other; empty if all do.
        ranks_per_node: neighbours in a group that are on a node; None if unknown: then hops relate no clocks.
    """
    corrections_ms = clock_corrections_ms(timelines, groups, ranks_per_node)
    return tuple(_shifted(timeline, corrections_ms[timeline.rank]) for timeline in timelines)


def clock_corrections_ms(
    timelines: Sequence[RankTimeline], groups: Sequence[Sequence[int]] = (), ranks_per_node: int | None = None
) -> dict[int, float]:
    """Returns the time that :func:`aligned` adds to each rank's clock, by rank."""
    ranks = [timeline.rank for timeline in timelines]
    assert len(set(ranks)) == len(ranks), ranks
    bounds_ms = _bounds_ms(timelines, groups, ranks_per_node)
    corrections_ms = np.zeros(len(timelines))
    for members in _connected(bounds_ms):
        if len(members) == 1:
            continue
        own_ms = _centre_ms(bounds_ms[np.ix_(members, members)])
        first_ms = np.array([min(span.start_ms for span in timelines[member].spans) for member in members])
        corrections_ms[members] = own_ms + first_ms.min() - (first_ms + own_ms).min()
    return dict(zip(ranks, corrections_ms.tolist(), strict=True))


def _bounds_ms(
    timelines: Sequence[RankTimeline], groups: Sequence[Sequence[int]], ranks_per_node: int | None
) -> np.ndarray:
    """Returns upper bounds of ``c_a - c_b``, infinite if unknown: [num_ranks, num_ranks]."""
    index_of = {timeline.rank: index for index, timeline in enumerate(timelines)}
    messages = [_messages(timeline) for timeline in timelines]
    bounds_ms = np.full((len(timelines), len(timelines)), np.inf)
    np.fill_diagonal(bounds_ms, 0.0)
    for group in groups or [list(index_of)]:
        for key in sorted({key for rank in group if rank in index_of for key in messages[index_of[rank]]}):
            for connected in _connected_by(key[0], group, ranks_per_node):
                members = [index_of[rank] for rank in connected if rank in index_of]
                present = [member for member in members if key in messages[member]]
                ends_ms = np.array([messages[member][key].end_ms for member in present])
                for sender in present:
                    sent = messages[sender][key]
                    if sent.num_bytes:  # no rank waits for an empty message
                        bounds_ms[sender, present] = np.minimum(bounds_ms[sender, present], ends_ms - sent.start_ms)
    np.fill_diagonal(bounds_ms, 0.0)
    return bounds_ms


def _connected_by(name: str, group: Sequence[int], ranks_per_node: int | None) -> list[Sequence[int]]:
    """The ranks of a group that a message connects, in sets of those that exchange rows; none if that is unknown."""
    op = Op.find(name)
    if op is None or op.kind not in BETWEEN_NODES | INSIDE_NODE:
        return [group]
    if ranks_per_node is None:
        return []
    if op.kind in BETWEEN_NODES:
        return [group[place::ranks_per_node] for place in range(ranks_per_node)]
    return [group[first : first + ranks_per_node] for first in range(0, len(group), ranks_per_node)]


def _messages(timeline: RankTimeline) -> dict[tuple[str, int], Span]:
    """Returns messages of expert parallelism, by name and occurrence (one in each micro-batch)."""
    found: dict[tuple[str, int], Span] = {}
    num_seen: dict[str, int] = {}
    for span in timeline.spans:
        if span.lane is Lane.COMM and (span.name in num_seen or _is_of_expert_parallelism(span.name)):
            occurrence = num_seen.get(span.name, 0)
            num_seen[span.name] = occurrence + 1
            found[span.name, occurrence] = span
    return found


def _is_of_expert_parallelism(name: str) -> bool:
    op = Op.find(name)
    return op is not None and isinstance(op.kind, OpKind) and op.kind.is_message


def _connected(bounds_ms: np.ndarray) -> list[list[int]]:
    """Returns sets of ranks with bounds in both directions between any two of them, directly or through others."""
    reached = np.isfinite(bounds_ms)
    for middle in range(len(reached)):
        reached |= np.outer(reached[:, middle], reached[middle])
    both = reached & reached.T
    return [list(np.flatnonzero(row)) for index, row in enumerate(both) if not row[:index].any()]


def _centre_ms(bounds_ms: np.ndarray) -> np.ndarray:
    """Returns corrections that meet all bounds, the mean over all reference ranks: [num_ranks]."""
    tight_ms = bounds_ms + max(0.0, -_smallest_cycle_mean_ms(bounds_ms))
    np.fill_diagonal(tight_ms, 0.0)
    for middle in range(len(tight_ms)):
        tight_ms = np.minimum(tight_ms, tight_ms[:, middle, None] + tight_ms[None, middle])
    np.fill_diagonal(tight_ms, 0.0)
    centre_ms: np.ndarray = ((tight_ms - tight_ms.T) / 2).mean(axis=1)
    return centre_ms


def _smallest_cycle_mean_ms(bounds_ms: np.ndarray) -> float:
    """Returns the smallest mean bound along a cycle of ranks (Karp's algorithm).

    If it is negative, because times are read late, no corrections meet all bounds. Then all bounds are widened by it,
    which is the least that helps.
    """
    num_ranks = len(bounds_ms)
    edges_ms = bounds_ms.copy()
    np.fill_diagonal(edges_ms, np.inf)
    walks_ms = [np.full(num_ranks, np.inf)]
    walks_ms[0][0] = 0.0
    for _ in range(num_ranks):
        walks_ms.append((walks_ms[-1][:, None] + edges_ms).min(axis=0))
    reachable = np.isfinite(walks_ms[-1])
    lengths = np.arange(num_ranks, 0, -1)[:, None]
    means_ms = (walks_ms[-1][reachable] - np.stack(walks_ms[:-1])[:, reachable]) / lengths
    return float(means_ms.max(axis=0).min())


def _shifted(timeline: RankTimeline, by_ms: float) -> RankTimeline:
    if by_ms == 0:
        return timeline
    moved = (replace(span, start_ms=span.start_ms + by_ms, end_ms=span.end_ms + by_ms) for span in timeline.spans)
    return replace(timeline, spans=tuple(moved))
