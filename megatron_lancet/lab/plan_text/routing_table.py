"""The routing of some windows as a table of text."""

from collections.abc import Sequence

from megatron_lancet.planning.load.popularity import ForecastError
from megatron_lancet.planning.load.routing_report import LayerRouting
from megatron_lancet.report.tables import right_aligned


def routing_table(layers: Sequence[LayerRouting], num_top: int) -> list[str]:
    """The lines of a table with a line for each layer.

    Args:
        num_top: experts that count as the most popular.
    """
    above = ["", "all", "window", "", "", "last window", "", "path table", ""]
    head = ["layer", "most/mean", "most/mean", f"top {num_top}", "drift", "error", "other top", "error", "other top"]
    return right_aligned([above, head, *(_line(layer) for layer in layers)])


def _line(layer: LayerRouting) -> list[str]:
    popularity = layer.popularity
    return [
        str(layer.layer),
        f"{popularity.most_over_mean:.2f}",
        f"{popularity.window_most_over_mean:.2f}",
        _percent(popularity.top_share),
        "-" if popularity.drift is None else _percent(popularity.drift),
        *_errors(layer.last_window),
        *_errors(layer.path_table),
    ]


def _errors(error: ForecastError | None) -> list[str]:
    return ["-", "-"] if error is None else [f"{100 * error.mean_error:.2f} %", f"{100 * error.other_top:.0f} %"]


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
