"""A report on the routing of some windows: popularity of each layer's experts, and the error of its forecast.

Two forecasts are compared on the same windows, the second half: what the last window was, as static expert load
balancing assumes (EPLB), and what Lina's path table says, profiled on the first half (``path_table.py``).

Legend: E experts, k experts of a token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_lancet.planning.load.path_table import PathTable, paths_into
from megatron_lancet.planning.load.popularity import (
    Choice,
    ForecastError,
    LayerPopularity,
    Shares,
    counted,
    forecast_error,
    layer_popularity,
    shares_of,
)

type Window = Mapping[int, Sequence[Choice]]
"""Of each layer, by its number from 1: choices of each token of the window. Tokens are in one order in all layers."""


@dataclass(frozen=True)
class LayerRouting:
    """Popularity and forecasts of one layer.

    Attributes:
        layer: its number, from 1.
        popularity: of its experts.
        last_window: how far the last window is off as a forecast of the next one; None where there is no later window.
        path_table: the same for the path table; None where no choices are known, as in measured loads, or no layer with
            experts comes before.
    """

    layer: int
    popularity: LayerPopularity
    last_window: ForecastError | None
    path_table: ForecastError | None


def default_num_top(num_experts: int, topk: int) -> int:
    """Lina's 2 k most popular experts, but at most half of all: the set of all experts never changes."""
    return max(1, min(2 * topk, num_experts // 2))


def routing_of_choices(windows: Sequence[Window], num_experts: int, num_top: int) -> list[LayerRouting]:
    """Per layer, what the choices of some windows say.

    Args:
        windows: in order; at least one.
        num_experts: E.
        num_top: experts that count as the most popular.
    """
    layers = sorted(windows[0])
    first = len(windows) // 2
    by_layer = [[window[layer] for layer in layers] for window in windows]
    found = []
    for place, layer in enumerate(layers):
        counts = [counted(window[layer], num_experts) for window in windows]
        forecasts = _by_path(by_layer, place, first, num_experts) if place else []
        later = [shares_of(window) for window in counts[first:]] if forecasts else []
        errors = _last_window_error(counts, first, num_top), forecast_error(forecasts, later, num_top)
        found.append(LayerRouting(layer, layer_popularity(counts, num_top), *errors))
    return found


def routing_of_loads(windows: Sequence[Mapping[int, Sequence[int]]], num_top: int) -> list[LayerRouting]:
    """Per layer, what measured loads say, where no choices are known.

    Args:
        windows: in order, rows of each expert by layer; at least one window.
        num_top: experts that count as the most popular.
    """
    first = len(windows) // 2
    found = []
    for layer in sorted(windows[0]):
        counts = [window[layer] for window in windows]
        found.append(
            LayerRouting(layer, layer_popularity(counts, num_top), _last_window_error(counts, first, num_top), None)
        )
    return found


def _last_window_error(counts: Sequence[Sequence[int]], first: int, num_top: int) -> ForecastError | None:
    """Of the windows from ``first`` on, each against the one before it."""
    shares = [shares_of(window) for window in counts]
    start = max(1, first)
    return forecast_error(shares[start - 1 : -1], shares[start:], num_top)


def _by_path(windows: Sequence[Sequence[Sequence[Choice]]], place: int, first: int, num_experts: int) -> list[Shares]:
    """The path table's forecasts of the windows from ``first`` on, profiled on those before; none without any."""
    if not first:
        return []
    table = PathTable(num_experts)
    for window in windows[:first]:
        table.learn(paths_into(place, window), window[place])
    return [table.forecast(paths_into(place, window)) for window in windows[first:]]
