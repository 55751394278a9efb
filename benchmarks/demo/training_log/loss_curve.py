"""Draws the loss curve of a run."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from benchmarks.demo.training_log.train_log import RunLog
from megatron_lancet.files.atomic import atomic_outputs

SMOOTHING_SPAN = 25
"""Number of steps in the moving average."""

_SIZE_INCHES = (8.0, 4.8)
_DOTS_PER_INCH = 150
_MARGINS = (0.005, 0.005, 0.975, 0.99)
"""Left, bottom, width and height of the drawing, as shares of the picture."""

_BLUE, _ORANGE, _RED, _GREY = "#1f5fa8", "#d97706", "#b91c1c", "#4b5563"
_HEADROOM_NATS = 0.35
_TOKENS_PER_K = 1000


@dataclass(frozen=True)
class LossCurve:
    """Content of the picture; all losses in nats per token.

    Attributes:
        run: log of a complete run.
        tokens_per_iteration: tokens in a global batch.
        resumed_after: step of the checkpoint that the run was resumed from, None if it was not.
        unigram_entropy: the best loss of a model without context.
    """

    title: str
    run: RunLog
    tokens_per_iteration: int
    resumed_after: int | None
    unigram_entropy: float

    @property
    def iterations(self) -> list[int]:
        """Training steps from 1, ascending: [num_steps]."""
        return [iteration.number for iteration in self.run.iterations]

    @property
    def losses(self) -> list[float]:
        """LM loss of each step: [num_steps]."""
        return [iteration.lm_loss for iteration in self.run.iterations]

    @property
    def validation_loss(self) -> float:
        """Validation loss after the last step."""
        assert self.run.validation is not None, "only a complete run has a picture"
        return self.run.validation.lm_loss


def smoothed(losses: Sequence[float], span: int = SMOOTHING_SPAN) -> np.ndarray:
    """Returns the moving average over ``span`` steps, fewer near the ends, without nan steps: [num_steps]."""
    values = np.asarray(losses, dtype=float)
    known = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    steps = np.arange(len(values))
    before = np.minimum(span // 2, steps)
    # Never more steps after than before: the curve falls steeply at its start and would begin too low.
    after = np.minimum(before, len(values) - 1 - steps)
    begins, ends = steps - before, steps + after + 1
    nums = counts[ends] - counts[begins]
    return np.where(nums > 0, (sums[ends] - sums[begins]) / np.maximum(nums, 1), np.nan)


def draw(curve: LossCurve) -> Figure:
    """Draws training loss, the step of the resume, validation loss and unigram entropy."""
    layout = ConstrainedLayoutEngine(rect=_MARGINS)
    figure = Figure(figsize=_SIZE_INCHES, dpi=_DOTS_PER_INCH, layout=layout)
    FigureCanvasAgg(figure)  # needs no window system and no state of pyplot
    axes = figure.add_subplot()
    _draw_training(axes, curve)
    _draw_yardsticks(axes, curve)
    axes.set_title(curve.title, fontsize=11, loc="left")
    axes.set_xlabel("training iteration")
    axes.set_ylabel("loss (nats per token)")
    last = curve.iterations[-1]
    axes.set_xlim(0, last * 1.02)
    axes.set_ylim(*_loss_limits(curve))
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines["right"].set_visible(False)
    tokens = curve.tokens_per_iteration / _TOKENS_PER_K
    top = axes.secondary_xaxis("top", functions=(partial(np.multiply, tokens), partial(np.multiply, 1 / tokens)))
    top.set_xlabel("training tokens (thousands)", fontsize=9, color=_GREY)
    top.tick_params(labelsize=8, colors=_GREY)
    axes.legend(loc="upper right", frameon=True, framealpha=0.9, edgecolor="none", fontsize=9)
    return figure


def write_png(curve: LossCurve, path: Path) -> None:
    """Draws ``curve`` into ``path`` atomically."""
    with atomic_outputs(path) as (temporary,):
        draw(curve).savefig(temporary, format="png")


def _loss_limits(curve: LossCurve) -> tuple[float, float]:
    values = [*curve.losses, curve.validation_loss, curve.unigram_entropy]
    known = [value for value in values if np.isfinite(value)]
    return min(known) - _HEADROOM_NATS, max(known) + _HEADROOM_NATS


def _draw_training(axes: Axes, curve: LossCurve) -> None:
    axes.plot(curve.iterations, curve.losses, color=_BLUE, alpha=0.3, linewidth=0.8, label="lm loss of each step")
    mean = smoothed(curve.losses)
    axes.plot(curve.iterations, mean, color=_BLUE, linewidth=1.8, label=f"mean of {SMOOTHING_SPAN} steps")
    if curve.resumed_after is not None:
        label = f"resumed from the checkpoint of step {curve.resumed_after}"
        axes.axvline(curve.resumed_after, color=_GREY, linestyle=":", linewidth=1.2, label=label)


def _draw_yardsticks(axes: Axes, curve: LossCurve) -> None:
    label = f"unigram entropy of the corpus: {curve.unigram_entropy:.2f}"
    axes.axhline(curve.unigram_entropy, color=_ORANGE, linestyle="--", linewidth=1.4, label=label)
    point = [curve.iterations[-1]], [curve.validation_loss]
    label = f"validation loss: {curve.validation_loss:.2f}"
    axes.plot(*point, linestyle="none", marker="D", markersize=7, color=_RED, zorder=5, clip_on=False, label=label)
