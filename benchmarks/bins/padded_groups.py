"""DynaPipe's dynamic program (EuroSys 2024, section 4): samples sorted by length, cut into groups that are padded.

Longest samples come first. A group of the samples i to j - 1 costs (j - i) * costs[i], which fulfils the quadrangle
inequality: the best start of the last group does not fall as j grows, so each round halves its range (divide and
conquer).
"""

from collections.abc import Sequence
from itertools import pairwise

_MOST_CELLS = 1 << 16
"""Samples times groups of one program; larger ones are done in parts, which takes well below a second."""

_NUM_BOUNDS = 6
"""Bounds on the cost of a group that are tried between the least possible one and none."""

_REFINED = 24
"""Halvings of the range in which the least bound is searched for."""


def padded_groups(
    lengths: Sequence[int], costs: Sequence[float], num_ranks: int, num_bins: int, max_tokens: int
) -> tuple[list[list[range]], int]:
    """Groups of sorted samples, ``num_ranks * num_bins`` of them, for several bounds on the cost of a group.

    Where the program would take long, ranks are divided into equal parts, and each part gets every n-th sample and a
    program of its own.

    Args:
        lengths: tokens, falling; at least as many samples as groups.
        costs: of the samples, falling.
        max_tokens: bound on the tokens of a padded group.

    Returns:
        For each bound on the cost the groups, and the bound on tokens: ``max_tokens``, or the least that fits.
    """
    cells = len(lengths) * num_ranks * num_bins
    divisors = [parts for parts in range(1, num_ranks + 1) if num_ranks % parts == 0]
    num_parts = next((parts for parts in divisors if cells <= parts * _MOST_CELLS), num_ranks)
    found = [
        _groups_of_part(lengths[part::num_parts], costs[part::num_parts], num_ranks // num_parts * num_bins, max_tokens)
        for part in range(num_parts)
    ]
    by_bound = zip(*(cuts for cuts, _ in found), strict=True)
    groups = [
        [
            range(part + first * num_parts, part + end * num_parts, num_parts)
            for part, ends in enumerate(cuts)
            for first, end in pairwise((0, *ends))
        ]
        for cuts in by_bound
    ]
    return groups, max(bound for _, bound in found)


def _groups_of_part(
    lengths: Sequence[int], costs: Sequence[float], num_groups: int, max_tokens: int
) -> tuple[list[tuple[int, ...]], int]:
    """Cut sorted samples into groups of the least total cost, for several bounds on the cost of a group.

    Returns:
        For each bound on the cost the ends of the groups, none of them empty, and the bound on tokens:
        ``max_tokens``, or the least that fits.
    """
    if _ends(_reach(lengths, max_tokens), num_groups)[-1] < len(lengths):
        low, high = max_tokens, lengths[0] * len(lengths)
        while high - low > 1:
            middle = (low + high) // 2
            fits = _ends(_reach(lengths, middle), num_groups)[-1] == len(lengths)
            low, high = (low, middle) if fits else (middle, high)
        max_tokens = high
    by_tokens = _reach(lengths, max_tokens)

    def reach(bound: float) -> list[int]:
        return [min(ends) for ends in zip(by_tokens, _reach(costs, bound), strict=True)]

    best = _cut(costs, by_tokens, num_groups)
    high_cost = max((end - first) * costs[first] for first, end in pairwise((0, *best)))
    low_cost, fitting = 0.0, high_cost
    for _ in range(_REFINED):
        middle_cost = (low_cost + fitting) / 2
        fits = _ends(reach(middle_cost), num_groups)[-1] == len(lengths)
        low_cost, fitting = (low_cost, middle_cost) if fits else (middle_cost, fitting)
    bounds = [fitting + (high_cost - fitting) * place / _NUM_BOUNDS for place in range(_NUM_BOUNDS)]
    return [best, *(_cut(costs, reach(bound), num_groups) for bound in bounds)], max_tokens


def _reach(sizes: Sequence[float], bound: float) -> list[int]:
    """Where a group that starts at each sample ends at the latest; the start itself where not one sample fits."""
    # Bounds are products of a size and a whole number, and their quotient may be the number before it.
    return [min(len(sizes), start + int(bound / size + 1e-9)) for start, size in enumerate(sizes)]


def _ends(reach: Sequence[int], num_groups: int) -> list[int]:
    """Ends of groups that take as many samples as they may."""
    ends = [0]
    for _ in range(num_groups):
        ends.append(reach[ends[-1]] if ends[-1] < len(reach) else ends[-1])
    return ends


def _cut(costs: Sequence[float], reach: Sequence[int], num_groups: int) -> tuple[int, ...]:
    """Ends of exactly ``num_groups`` groups within their reach of the least total cost."""
    num_samples, farthest = len(costs), _ends(reach, num_groups)
    # The earliest start of a group that ends at each sample: starts that reach it.
    earliest = [0] * (num_samples + 1)
    start = 0
    for end in range(1, num_samples + 1):
        while reach[start] < end and start < end - 1:
            start += 1
        earliest[end] = start
    total: list[float] = [0.0]
    starts: list[list[int]] = []
    for group in range(1, num_groups + 1):
        starts_from = range(group - 1, farthest[group - 1] + 1)
        row = _Row(costs, total, earliest, starts_from)
        row.fill(group, min(num_samples, farthest[group]), 0, num_samples)
        total = row.total
        starts.append(row.starts)
    ends = [num_samples]
    for chosen in reversed(starts):
        ends.append(chosen[ends[-1]])
    return tuple(reversed(ends[:-1]))


class _Row:
    """Least cost of one more group, by where it ends.

    Attributes:
        total: by end, least cost of all groups so far.
        starts: by end, where the last group of that least cost starts.
    """

    def __init__(
        self, costs: Sequence[float], before: Sequence[float], earliest: Sequence[int], starts_from: range
    ) -> None:
        self._costs, self._before, self._earliest, self._starts_from = costs, before, earliest, starts_from
        self.total, self.starts = [0.0] * (len(costs) + 1), [0] * (len(costs) + 1)

    def fill(self, first: int, last: int, low: int, high: int) -> None:
        """Fill in the ends ``first`` to ``last``, whose best starts are between ``low`` and ``high``."""
        if first > last:
            return
        end = (first + last) // 2
        allowed = range(
            max(low, self._earliest[end], self._starts_from.start), min(high + 1, end, self._starts_from.stop)
        )
        self.total[end], self.starts[end] = min(
            (self._before[start] + (end - start) * self._costs[start], start) for start in allowed
        )
        self.fill(first, end - 1, low, self.starts[end])
        self.fill(end + 1, last, self.starts[end], high)
