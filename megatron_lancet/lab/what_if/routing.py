"""Shares of its group's routed rows that each rank receives, for given routings and layouts."""

from collections.abc import Sequence


def even_share(size: int) -> tuple[float, ...]:
    """Equal shares of ``size`` ranks."""
    return (1 / size,) * size


def zipf_share(exponent: float, num_experts: int, size: int) -> tuple[float, ...]:
    """Shares if the i-th most popular expert gets rows in proportion to ``1 / i ** exponent``; exponent 0 is even.

    Expert i is on rank i modulo ``size``, so popular experts are spread over the ranks; a measured histogram may be
    more uneven.
    """
    weights = [1 / (expert + 1) ** exponent for expert in range(num_experts)]
    total = sum(weights)
    return tuple(sum(weights[rank::size]) / total for rank in range(size))


def rebinned_share(measured: Sequence[float], size: int) -> tuple[float, ...]:
    """Converts measured shares to another number of ranks; all experts of a measured rank count as equally popular.

    More ranks than measured therefore look more even than they are.
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
