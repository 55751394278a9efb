"""Shares of routed rows with fewer distinct values: ranks with equal shares are simulated once."""

from collections.abc import Sequence

_EVEN_DIGITS = 9


def merge_similar_shares(shares: Sequence[float], max_distinct: int) -> tuple[float, ...]:
    """Shares of which at most ``max_distinct`` differ: the largest as it is, neighbours by size among others averaged.

    The busiest rank sets a step's pace; the others differ little from their group's mean.
    """
    if len({round(share, _EVEN_DIGITS) for share in shares}) <= max_distinct:
        return tuple(shares)
    _, *rest = sorted(range(len(shares)), key=lambda rank: -shares[rank])
    merged = list(shares)
    num_groups = max_distinct - 1
    for group in range(num_groups):
        ranks = rest[group * len(rest) // num_groups : (group + 1) * len(rest) // num_groups]
        mean = sum(shares[rank] for rank in ranks) / len(ranks)
        for rank in ranks:
            merged[rank] = mean
    return tuple(merged)
