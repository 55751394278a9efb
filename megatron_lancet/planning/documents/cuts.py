"""Cuts a sequence of documents into chunks: near equal cost, at the end of a document if one is near."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise

from megatron_lancet.planning.documents.cost import DocumentCost
from megatron_lancet.schedule.chunk_sizes import most_chunks

NEAR = 0.1
"""Distance of a document's end from the place of equal cost up to which it is taken, as a share of a chunk's cost. A
cut document costs no more pairs, but a second call of the kernel, which reads keys of another chunk."""


def cut_sizes(samples: Sequence[Sequence[int]], num_chunks: int, cost: DocumentCost, multiple: int = 1) -> list[int]:
    """Sizes of the chunks of a sequence; all samples are cut at the same positions.

    Args:
        samples: lengths of each sample's documents, in order; all samples have the same sum.
        num_chunks: at most as many as the sequence has multiples.
        multiple: the sizes are multiples of this number, unless there is one chunk only.

    Returns:
        As many as there are chunks, all above 0. Each chunk ends where the cost of what precedes it is nearest to its
        share, or at a document's end near there, of most samples if samples have different ends.
    """
    num_positions = sum(samples[0])
    assert all(sum(lengths) == num_positions for lengths in samples), "samples of different lengths"
    if num_chunks == 1:
        return [num_positions]
    assert num_chunks <= most_chunks(num_positions, multiple), (num_positions, num_chunks, multiple)
    costs = [_CostUpTo(lengths, cost) for lengths in samples]
    share = sum(one(num_positions) for one in costs) / num_chunks
    ends = [0]
    for index in range(1, num_chunks):
        first, last = ends[-1] + multiple, num_positions - (num_chunks - index) * multiple
        ends.append(_end_near(costs, index * share, NEAR * share, range(first, last + 1, multiple)))
    ends.append(num_positions)
    return [end - start for start, end in pairwise(ends)]


class _CostUpTo:
    """Cost of the first positions of a sample."""

    def __init__(self, lengths: Sequence[int], cost: DocumentCost) -> None:
        self.ends = list(accumulate(lengths, initial=0))
        self._before = list(accumulate((cost.of(length) for length in lengths), initial=0.0))
        self._cost = cost

    def __call__(self, num_positions: int) -> float:
        document = bisect_right(self.ends, num_positions) - 1
        return self._before[document] + self._cost.of(num_positions - self.ends[document])

    def is_end(self, position: int) -> bool:
        """Whether a document ends there."""
        index = bisect_left(self.ends, position)
        return index < len(self.ends) and self.ends[index] == position


def _end_near(costs: Sequence[_CostUpTo], wanted: float, distance: float, places: range) -> int:
    """The place in ``places`` where the cost up to it is ``wanted``, or a document's end no farther from that than
    ``distance``.
    """

    def cost(place: int) -> float:
        return sum(one(place) for one in costs)

    def farness(place: int) -> float:
        return abs(cost(place) - wanted)

    above = bisect_left(places, wanted, key=cost)
    nearest = min(places[max(above - 1, 0) : above + 1], key=farness)
    first = bisect_left(places, wanted - distance, key=cost)
    last = bisect_right(places, wanted + distance, key=cost)
    ends = {end for one in costs for end in _between(one.ends, places, first, last) if end in places}
    best = min(ends, key=lambda end: (-sum(one.is_end(end) for one in costs), farness(end)), default=None)
    return nearest if best is None else best


def _between(ends: Sequence[int], places: range, first: int, last: int) -> Sequence[int]:
    """The ``ends`` from the place with index ``first`` to the place before index ``last``."""
    if first >= last:
        return ()
    return ends[bisect_left(ends, places[first]) : bisect_right(ends, places[last - 1])]
