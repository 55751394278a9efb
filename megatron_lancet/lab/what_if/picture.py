"""Draws forecasts over cluster sizes."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from megatron_lancet.files.atomic import atomic_outputs
from megatron_lancet.lab.what_if.forecast import SweepRow

_SIZE_INCHES = (8.0, 6.4)
_DOTS_PER_INCH = 150
_COLORS = ("#4b5563", "#d97706", "#1f5fa8", "#15803d")
_MARKERS = ("s", "^", "o", "D")
_LINES = (":", "--", "-", "-.")


def draw(rows: Sequence[SweepRow], title: str) -> Figure:
    """Draws the step time and, below it, the exposed share over the number of ranks."""
    figure = Figure(figsize=_SIZE_INCHES, dpi=_DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)  # needs no window system and no state of pyplot
    steps, shares = figure.subplots(2, 1, sharex=True)
    ranks = [row.layout.world_size for row in rows]
    for index, name in enumerate(rows[0].forecasts):
        style = {
            "color": _COLORS[index % len(_COLORS)],
            "marker": _MARKERS[index % len(_MARKERS)],
            "linestyle": _LINES[index % len(_LINES)],
            "label": name,
        }
        steps.plot(ranks, [row.forecasts[name].step_ms for row in rows], **style)
        shares.plot(ranks, [100 * row.forecasts[name].exposed_share for row in rows], **style)
    steps.set_title(title, fontsize=11, loc="left")
    steps.set_ylabel("predicted step (ms)")
    shares.set_ylabel("exposed all-to-all (% of step)")
    shares.set_xlabel("ranks (EP size below)")
    for axes in (steps, shares):
        _finish(axes, rows)
    steps.legend(loc="upper left", frameon=True, framealpha=0.9, edgecolor="none", fontsize=9)
    return figure


def write_png(rows: Sequence[SweepRow], title: str, path: Path) -> None:
    """Draws into ``path`` atomically."""
    with atomic_outputs(path) as (temporary,):
        draw(rows, title).savefig(temporary, format="png")


def _finish(axes: Axes, rows: Sequence[SweepRow]) -> None:
    ranks = [row.layout.world_size for row in rows]
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(ranks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels([f"{row.layout.world_size}\nEP {row.layout.ep_size}" for row in rows], fontsize=8)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines["right"].set_visible(False)
    axes.spines["top"].set_visible(False)
