"""Clocks of ranks brought together, so that the two ends of a message meet.

Each rank reads its own clock. What relates them is that nobody has a message before all its senders have sent it: if
rank a issues a collective at ``start_a`` and rank b has it at ``end_b``, then with corrections c added to the clocks

    start_a + c_a <= end_b + c_b        for all pairs of its ranks.

Over all collectives of a step the smallest ``end_b - start_a`` bounds ``c_a - c_b`` from above, and the smallest
``end_a - start_b`` from below. As in NTP the middle of the two is taken: its error is half the difference of the two
smallest latencies. With more than two ranks the bounds are first tightened along paths, and each rank in turn is the
reference; every such solution meets all bounds, and so does their mean.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron_lancet.schedule.ops import Op, OpKind
from megatron_lancet.schedule.timeline import Lane, RankTimeline, Span


def aligned(timelines: Sequence[RankTimeline], groups: Sequence[Sequence[int]] = ()) -> tuple[RankTimeline, ...]:
    """The timelines on one clock.

    Ranks that share no message, directly or through others, can't be related: then each such set of ranks is aligned
    in itself. In each the earliest span keeps its time; one rank alone stays as it is.

    Args:
        timelines: of one step, one per rank, each on the rank's own clock.
        groups: ranks that exchange messages with each other; empty if all do.
    """
    corrections_ms = clock_corrections_ms(timelines, groups)
    return tuple(_shifted(timeline, corrections_ms[timeline.rank]) for timeline in timelines)


def clock_corrections_ms(timelines: Sequence[RankTimeline], groups: Sequence[Sequence[int]] = ()) -> dict[int, float]:
    """What :func:`aligned` adds to the times of each rank, by rank."""
    ranks = [timeline.rank for timeline in timelines]
    assert len(set(ranks)) == len(ranks), ranks
    bounds_ms = _bounds_ms(timelines, groups)
    corrections_ms = np.zeros(len(timelines))
    for members in _connected(bounds_ms):
        if len(members) == 1:
            continue
        own_ms = _centre_ms(bounds_ms[np.ix_(members, members)])
        first_ms = np.array([_first_ms(timelines[member]) for member in members])
        corrections_ms[members] = own_ms + first_ms.min() - (first_ms + own_ms).min()
    return dict(zip(ranks, corrections_ms.tolist(), strict=True))


def _bounds_ms(timelines: Sequence[RankTimeline], groups: Sequence[Sequence[int]]) -> np.ndarray:
    """Upper bounds of ``c_a - c_b``, infinite where nothing is known: [num_ranks, num_ranks]."""
    index_of = {timeline.rank: index for index, timeline in enumerate(timelines)}
    messages = [_messages(timeline) for timeline in timelines]
    bounds_ms = np.full((len(timelines), len(timelines)), np.inf)
    np.fill_diagonal(bounds_ms, 0.0)
    for group in groups or [list(index_of)]:
        members = [index_of[rank] for rank in group if rank in index_of]
        for key in sorted({key for member in members for key in messages[member]}):
            present = [member for member in members if key in messages[member]]
            ends_ms = np.array([messages[member][key].end_ms for member in present])
            for sender in present:
                sent = messages[sender][key]
                if sent.num_bytes:  # an empty message holds nobody up
                    bounds_ms[sender, present] = np.minimum(bounds_ms[sender, present], ends_ms - sent.start_ms)
    np.fill_diagonal(bounds_ms, 0.0)
    return bounds_ms


def _messages(timeline: RankTimeline) -> dict[tuple[str, int], Span]:
    """Messages of expert parallelism, by name and how often that name came before: once in each micro-batch."""
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
    """Sets of ranks with bounds in both directions between any two of them, maybe through others."""
    reached = np.isfinite(bounds_ms)
    for middle in range(len(reached)):
        reached |= np.outer(reached[:, middle], reached[middle])
    both = reached & reached.T
    return [list(np.flatnonzero(row)) for index, row in enumerate(both) if not row[:index].any()]


def _centre_ms(bounds_ms: np.ndarray) -> np.ndarray:
    """Corrections that meet all bounds, as far from them as the ranks' mean allows: [num_ranks]."""
    tight_ms = bounds_ms + max(0.0, -_smallest_cycle_mean_ms(bounds_ms))
    np.fill_diagonal(tight_ms, 0.0)
    for middle in range(len(tight_ms)):
        tight_ms = np.minimum(tight_ms, tight_ms[:, middle, None] + tight_ms[None, middle])
    np.fill_diagonal(tight_ms, 0.0)
    centre_ms: np.ndarray = ((tight_ms - tight_ms.T) / 2).mean(axis=1)
    return centre_ms


def _smallest_cycle_mean_ms(bounds_ms: np.ndarray) -> float:
    """Smallest mean bound along a cycle of ranks (Karp). Below zero no corrections meet all bounds.

    That happens by as much as times are read late. All bounds are then widened by it, the least that helps.
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


def _first_ms(timeline: RankTimeline) -> float:
    return min(span.start_ms for span in timeline.spans)


def _shifted(timeline: RankTimeline, by_ms: float) -> RankTimeline:
    if by_ms == 0:
        return timeline
    moved = (replace(span, start_ms=span.start_ms + by_ms, end_ms=span.end_ms + by_ms) for span in timeline.spans)
    return replace(timeline, spans=tuple(moved))
