"""Draws each case's steps as stacked bars: compute, and what is exposed."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no display is needed
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from benchmarks.network.summary import CaseSummary

_PARTS = (
    ("compute of both passes", "#4878a8"),
    ("exposed payload", "#d1615d"),
    ("exposed counts", "#e7a23c"),
    ("gradient reduction and optimizer", "#9a9a9a"),
)
_BOUND_COLOUR = "#222222"
_INCHES_PER_BAR = 0.24
_WIDTH_INCHES = 9.0


def draw(cases: Sequence[CaseSummary], path: Path) -> None:
    """Write the picture: one panel per case, one bar per variant, a tick at its lower bound."""
    heights = [len(case.rows) + 4 for case in cases]
    figure, axes = plt.subplots(
        len(cases),
        1,
        figsize=(_WIDTH_INCHES, _INCHES_PER_BAR * sum(heights) + 0.5),
        squeeze=False,
        gridspec_kw={"height_ratios": heights},
        layout="constrained",
    )
    for case, axis in zip(cases, axes[:, 0], strict=True):
        _draw_case(axis, case)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _draw_case(axis: Axes, case: CaseSummary) -> None:
    positions = range(len(case.rows))
    left = [0.0] * len(case.rows)
    for (label, colour), widths in zip(_PARTS, _widths(case), strict=True):
        axis.barh(positions, widths, left=left, color=colour, label=label, height=0.7)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    bounds = [(position, row.bound_ms) for position, row in zip(positions, case.rows, strict=True) if row.bound_ms]
    axis.plot(
        [bound for _, bound in bounds],
        [position for position, _ in bounds],
        linestyle="none",
        marker="|",
        markersize=11,
        markeredgewidth=2,
        color=_BOUND_COLOUR,
        label="lower bound: compute or link, whichever takes longer",
    )
    axis.set_yticks(positions, [row.name for row in case.rows], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(left=0)
    rest = any(row.rest_ms > 0 for row in case.rows)
    axis.set_xlabel(f"ms for forward, backward{', reduction and Adam' if rest else ''}", fontsize=8)
    axis.tick_params(axis="x", labelsize=8)
    disturbed = " (DISTURBED)" if case.disturbed else ""
    axis.set_title(f"{case.title}: {case.rate_bps / 1e6:.0f} Mbit/s{disturbed}", fontsize=9, loc="left")
    axis.spines[["top", "right"]].set_visible(False)


def _widths(case: CaseSummary) -> list[list[float]]:
    """Of each part, for all variants."""
    return [
        [row.step_ms - row.exposed_ms - row.counts_ms - row.rest_ms for row in case.rows],
        [row.exposed_ms for row in case.rows],
        [row.counts_ms for row in case.rows],
        [row.rest_ms for row in case.rows],
    ]
