"""Samples packed into bins of nearly equal cost: the largest first, each into the bin with the most free space."""

import heapq
from bisect import bisect_left
from collections.abc import Sequence

_NUM_PARTNERS = 8
"""Bins with the most free space that an overfull bin tries to exchange samples with."""

_EVEN = 0.002
"""Bins that exceed their share of the step by less than this are even enough."""


def largest_first(
    lengths: Sequence[int], costs: Sequence[float], num_ranks: int, num_bins: int, max_tokens: int
) -> tuple[list[list[int]], int]:
    """Pack samples into ``num_ranks * num_bins`` bins, none of them empty.

    Bins that run at the same time on all ranks, a column, should cost the same; columns may differ. A column that has
    to hold a sample of more than the mean bin's cost is filled up to it on all ranks, and the others hold less.

    Args:
        lengths: tokens of the samples, at least as many as bins.
        costs: of the samples.
        max_tokens: bound on the tokens of a bin.

    Returns:
        The samples of each bin, and the bound that they keep: ``max_tokens``, or the most tokens of a bin where even
        samples that are packed to equal tokens exceed ``max_tokens``.
    """
    shares = _shares(costs, num_ranks, num_bins)
    found = _packed(lengths, costs, shares, max_tokens)
    if found is None:
        even_tokens = _packed(lengths, lengths, _shares(lengths, 1, num_ranks * num_bins), None)
        assert even_tokens is not None, "packing without a bound always ends"
        found = even_tokens
    exchange = _Exchange(lengths, costs, shares, max_tokens, found)
    exchange.improve()
    return found, max(max_tokens, exchange.most_tokens)


def _shares(costs: Sequence[float], num_ranks: int, num_bins: int) -> list[float]:
    """The cost that each bin should have, column after column: the same level, or the cost of the column's largest
    sample.

    The largest samples are seeds, ``num_ranks`` to a column. Shares add up to the cost of all samples unless the seeds
    alone exceed it.
    """
    heights = sorted(costs, reverse=True)[: num_ranks * num_bins : num_ranks]
    rest = sum(costs) / num_ranks
    level = 0.0
    for num_high in range(num_bins):
        level = max(0.0, (rest - sum(heights[:num_high])) / (num_bins - num_high))
        if heights[num_high] <= level:
            break
    return [max(height, level) for height in heights for _ in range(num_ranks)]


def _packed(
    lengths: Sequence[int], costs: Sequence[float], shares: Sequence[float], max_tokens: int | None
) -> list[list[int]] | None:
    """Give each sample, largest first, to the bin with the most free space; None if the bound leaves no bin."""
    bins: list[list[int]] = [[] for _ in shares]
    tokens = [0] * len(shares)
    room = [(-share, place) for place, share in enumerate(shares)]
    heapq.heapify(room)
    num_empty = len(bins)
    order = sorted(range(len(lengths)), key=lambda index: (-costs[index], -lengths[index], index))
    for num_done, index in enumerate(order):
        only_empty = num_empty == len(order) - num_done
        passed = []
        while room:
            entry = heapq.heappop(room)
            place = entry[1]
            fits = max_tokens is None or tokens[place] + lengths[index] <= max_tokens
            if fits and not (only_empty and bins[place]):
                break
            passed.append(entry)
        else:
            return None
        num_empty -= not bins[place]
        bins[place].append(index)
        tokens[place] += lengths[index]
        heapq.heappush(room, (entry[0] + costs[index], place))
        for skipped in passed:
            heapq.heappush(room, skipped)
    return bins


class _Exchange:
    """Moves and exchanges of samples between a bin above its share and another, while the larger gets smaller."""

    def __init__(
        self,
        lengths: Sequence[int],
        costs: Sequence[float],
        shares: Sequence[float],
        max_tokens: int,
        bins: list[list[int]],
    ) -> None:
        self._lengths, self._costs, self._shares, self._max_tokens, self._bins = (
            lengths,
            costs,
            shares,
            max_tokens,
            bins,
        )
        self._tokens = [sum(lengths[index] for index in indices) for indices in bins]
        self._excess = [sum(costs[index] for index in bins[place]) - share for place, share in enumerate(shares)]

    def improve(self) -> None:
        """Exchange until all bins are near their shares or the bin that is farthest above its share can't shrink."""
        even = _EVEN * sum(self._shares) / len(self._shares)
        for _ in range(4 * len(self._bins)):
            by_excess = sorted(range(len(self._bins)), key=lambda place: (self._excess[place], place))
            high = by_excess[-1]
            if self._excess[high] <= even:
                return
            if not any(self._exchanged(high, low) for low in by_excess[:_NUM_PARTNERS] if low != high):
                return

    @property
    def most_tokens(self) -> int:
        """Tokens of the bin that has the most."""
        return max(self._tokens)

    def _exchanged(self, high: int, low: int) -> bool:
        """Give samples of ``high`` to ``low`` so that the larger excess falls the most; False if it can't fall."""
        wanted = (self._excess[high] - self._excess[low]) / 2
        takers = sorted((self._costs[index], index) for index in self._bins[low])
        best: tuple[float, int, int | None] | None = None
        for given in self._bins[high]:
            options: list[int | None] = [None] if len(self._bins[high]) > 1 else []
            near = bisect_left(takers, (self._costs[given] - wanted, -1))
            options += [index for _, index in takers[max(0, near - 1) : near + 1]]
            for returned in options:
                moved = self._costs[given] - (0.0 if returned is None else self._costs[returned])
                after = max(self._excess[high] - moved, self._excess[low] + moved)
                if moved > 0 and (best is None or after < best[0]) and self._fits(high, low, given, returned):
                    best = (after, given, returned)
        # A little less would never end: sums of floats differ in their last bits.
        if best is None or best[0] > self._excess[high] - 1e-9 * self._shares[high]:
            return False
        self._move(high, low, best[1])
        if best[2] is not None:
            self._move(low, high, best[2])
        return True

    def _fits(self, high: int, low: int, given: int, returned: int | None) -> bool:
        moved = self._lengths[given] - (0 if returned is None else self._lengths[returned])
        return self._tokens[low] + moved <= self._max_tokens and self._tokens[high] - moved <= self._max_tokens

    def _move(self, source: int, target: int, index: int) -> None:
        self._bins[source].remove(index)
        self._bins[target].append(index)
        for place, sign in ((source, -1), (target, 1)):
            self._tokens[place] += sign * self._lengths[index]
            self._excess[place] += sign * self._costs[index]
