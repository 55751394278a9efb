"""How popular the experts of a layer are, how that drifts, and how far a forecast of it is off.

A *window* is a batch of tokens. The popularity of a layer's experts in it are their shares of the routed rows (a row is
a token and one of its experts).

Legend: E experts, k experts of a token.
"""

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

type Choice = tuple[int, ...]
"""The k experts of a token in one layer, in ascending order."""
type Shares = tuple[float, ...]
"""Each expert's share of a layer's rows, [E]; sums to 1."""


@dataclass(frozen=True)
class LayerPopularity:
    """The popularity of a layer's experts over some windows.

    Attributes:
        counts: rows of each expert in all windows, [E].
        most_over_mean: rows of the most popular expert over the mean of all.
        window_most_over_mean: the same in a single window, median.
        top_share: share of all rows that the most popular experts get.
        drift: share of the rows that would have to go to another expert to make a window's shares equal to the window
            before it, mean; None for a single window.
    """

    counts: tuple[int, ...]
    most_over_mean: float
    window_most_over_mean: float
    top_share: float
    drift: float | None


def counted(choices: Sequence[Choice], num_experts: int) -> tuple[int, ...]:
    """Rows of each expert, [E], for the choices of some tokens."""
    counts = [0] * num_experts
    for choice in choices:
        for expert in choice:
            counts[expert] += 1
    return tuple(counts)


def shares_of(counts: Sequence[float]) -> Shares:
    """Shares of the sum; even ones where that is 0."""
    total = sum(counts)
    return tuple(count / total if total else 1 / len(counts) for count in counts)


def most_over_mean(values: Sequence[float]) -> float:
    """The largest value over the mean; 1 where all are 0."""
    total = sum(values)
    return max(values) * len(values) / total if total else 1.0


def most_popular(values: Sequence[float], number: int) -> frozenset[int]:
    """The n most popular experts; ties go to the lower index."""
    return frozenset(sorted(range(len(values)), key=lambda expert: (-values[expert], expert))[:number])


def moved_share(before: Sequence[float], after: Sequence[float]) -> float:
    """Share of rows that change their expert between two popularities: half the sum of the differences."""
    return sum(abs(a - b) for a, b in zip(before, after, strict=True)) / 2


def mean_absolute_error(forecast: Sequence[float], found: Sequence[float]) -> float:
    """Mean over experts of the difference between forecast and found shares."""
    return statistics.mean(abs(a - b) for a, b in zip(forecast, found, strict=True))


def layer_popularity(windows: Sequence[Sequence[int]], num_top: int) -> LayerPopularity:
    """Popularity in the windows of a layer.

    Args:
        windows: rows of each expert, [windows][E]; at least one window.
        num_top: experts that count as the most popular.
    """
    counts = tuple(map(sum, zip(*windows, strict=True)))
    shares = [shares_of(window) for window in windows]
    total = shares_of(counts)
    drifts = [moved_share(before, after) for before, after in itertools.pairwise(shares)]
    return LayerPopularity(
        counts=counts,
        most_over_mean=most_over_mean(counts),
        window_most_over_mean=statistics.median(map(most_over_mean, windows)),
        top_share=sum(total[expert] for expert in most_popular(counts, num_top)),
        drift=statistics.mean(drifts) if drifts else None,
    )


@dataclass(frozen=True)
class ForecastError:
    """How far a forecast of popularity was off.

    Attributes:
        num_windows: windows that were forecast.
        mean_error: mean absolute error of an expert's share, over experts and windows.
        other_top: share of the windows whose most popular experts differed from the forecast.
    """

    num_windows: int
    mean_error: float
    other_top: float


def forecast_error(
    forecasts: Sequence[Sequence[float]], found: Sequence[Sequence[float]], num_top: int
) -> ForecastError | None:
    """Compares forecasts with what was found in the same windows; None without any.

    Args:
        forecasts: shares, [windows][E].
        found: shares, [windows][E].
        num_top: experts whose set is compared; Lina (ATC 2023) takes 2 k.
    """
    if not forecasts:
        return None
    pairs = list(zip(forecasts, found, strict=True))
    return ForecastError(
        len(pairs),
        statistics.mean(mean_absolute_error(a, b) for a, b in pairs),
        statistics.mean(most_popular(a, num_top) != most_popular(b, num_top) for a, b in pairs),
    )
