"""Reduces the number of distinct shares of routed rows: ranks with equal shares are simulated once."""

from collections.abc import Sequence

_EVEN_DIGITS = 9


def merge_similar_shares(shares: Sequence[float], max_distinct: int) -> tuple[float, ...]:
    """Returns shares with at most ``max_distinct`` values: the largest is kept, others of similar size are averaged.

    The busiest rank determines the step time; the others differ little from their group's mean.
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
