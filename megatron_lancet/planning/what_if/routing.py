"""How unevenly routed rows arrive: the share of its group's rows that each rank receives, in other layouts too."""

from collections.abc import Sequence


def even_share(size: int) -> tuple[float, ...]:
    """Every one of ``size`` ranks receives as much."""
    return (1 / size,) * size


def zipf_share(exponent: float, num_experts: int, size: int) -> tuple[float, ...]:
    """The i-th most popular expert gets rows in proportion to ``1 / i ** exponent``; experts are dealt in turn.

    Dealt in turn (expert i on rank i modulo ``size``), popular experts are spread over the ranks: a measured histogram
    may be worse. Exponent 0 is even.
    """
    weights = [1 / (expert + 1) ** exponent for expert in range(num_experts)]
    total = sum(weights)
    return tuple(sum(weights[rank::size]) / total for rank in range(size))


def rebinned_share(measured: Sequence[float], size: int) -> tuple[float, ...]:
    """A measured histogram over another number of ranks; what a rank received counts evenly for all its experts.

    More ranks than measured therefore look more even than they will be: within a rank nothing was measured.
    """
    if size == len(measured):
        return tuple(measured)
    shares = []
    for rank in range(size):
        # This rank's experts, as an interval of the measured ranks.
        start, end = rank * len(measured) / size, (rank + 1) * len(measured) / size
        shares.append(
            sum(share * max(0.0, min(end, index + 1) - max(start, index)) for index, share in enumerate(measured))
        )
    total = sum(shares)
    return tuple(share / total for share in shares)
