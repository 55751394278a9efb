"""Draws a step of stock and a step of ours above each other, to the same scale, from the timelines of real steps."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from benchmarks.demo.claim import headline
from megatron_lancet.files.atomic import atomic_outputs
from megatron_lancet.schedule.ops import Op, OpKind, Phase
from megatron_lancet.schedule.timeline import Lane, RankTimeline, Span

_CHUNKS = ("#2f6fb0", "#e08a2e", "#8e5ea2", "#c0504d")
_WHOLE, _WEIGHT_GRAD, _WAITING = "#6f7f92", "#7a9e3b", "#dddddd"
_COMPUTE_LANE, _MESSAGE_LANE = 1.0, 0.0
_HEIGHT = 0.8
_SIZE_INCHES = (10.0, 4.4)
_DOTS_PER_INCH = 130


def write_picture(stock: RankTimeline, ours: RankTimeline, summary: Mapping[str, Any], path: Path) -> None:
    """Writes the picture atomically.

    Args:
        stock: a rank's step with stock modules, whose compute is not told apart.
        ours: the same rank's step under a plan.
        summary: of the demo.
    """
    with atomic_outputs(path) as (temporary,):
        draw(stock, ours, summary).savefig(temporary, format="png")


def draw(stock: RankTimeline, ours: RankTimeline, summary: Mapping[str, Any]) -> Figure:
    """Draws both timelines of a rank."""
    figure = Figure(figsize=_SIZE_INCHES, dpi=_DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)  # needs no window system and no state of pyplot
    above, below = figure.subplots(2, 1, sharex=True)
    _draw_step(above, stock, _CHUNKS[0], "stock Megatron", summary["stock_step_ms"])
    _draw_step(below, ours, _WHOLE, "Megatron-Lancet", summary["step_ms"])
    below.set_xlim(0, max(stock.step_ms, ours.step_ms))
    below.set_xlabel(f"milliseconds of a step on rank 0; {summary['link']}", fontsize=8)
    chunks = sorted({chunk for span in ours.spans if (chunk := _chunk(span)) is not None})
    handles = [
        *(Patch(color=_CHUNKS[chunk % len(_CHUNKS)], label=f"chunk {chunk + 1}") for chunk in chunks),
        Patch(color=_WEIGHT_GRAD, label="deferred weight gradients"),
        Patch(color=_WHOLE, label="unchunked micro-batch, reduction, optimizer"),
        Patch(color=_WAITING, label="compute waits"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=8)
    text = headline(summary)
    figure.suptitle(text[0].upper() + text[1:], fontsize=11)
    return figure


def _draw_step(axes: Axes, timeline: RankTimeline, other: str, name: str, median_ms: float) -> None:
    """One timeline of two lanes. What is neither a wait nor an op of a chunk has the colour ``other``."""
    axes.broken_barh([(0, timeline.step_ms)], (_COMPUTE_LANE, _HEIGHT), facecolors=other)
    for colour, spans in _by_colour(timeline.spans, other).items():
        intervals = [(span.start_ms, span.ms) for span in spans]
        axes.broken_barh(intervals, (_COMPUTE_LANE, _HEIGHT), facecolors=colour)
    messages = [span for span in timeline.spans if span.lane is Lane.COMM and not _is_counts(span)]
    for span in messages:
        chunk = _chunk(span)
        colour = _CHUNKS[0 if chunk is None else chunk % len(_CHUNKS)]
        box = [(span.start_ms, span.ms)], (_MESSAGE_LANE, _HEIGHT)
        axes.broken_barh(*box, facecolors=colour, edgecolor="white", linewidth=0.8, alpha=0.75)
    axes.set_yticks([_COMPUTE_LANE + _HEIGHT / 2, _MESSAGE_LANE + _HEIGHT / 2], ["compute", "all-to-alls"])
    waited = timeline.exposed_ms() / timeline.step_ms
    title = f"{name}: this step {timeline.step_ms:.0f} ms (median {median_ms:.0f} ms), {waited:.0%} of it waiting"
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_frame_on(False)
    axes.tick_params(labelsize=8)


def _by_colour(spans: Sequence[Span], other: str) -> dict[str, list[Span]]:
    found: dict[str, list[Span]] = {}
    for span in spans:
        if span.lane is Lane.WAIT:
            found.setdefault(_WAITING, []).append(span)
        elif span.lane is Lane.COMPUTE:
            found.setdefault(_colour(span, other), []).append(span)
    return found


def _colour(span: Span, other: str) -> str:
    op = Op.find(span.name)
    if op is not None and op.phase is Phase.WEIGHT_GRAD:
        return _WEIGHT_GRAD
    chunk = _chunk(span)
    return other if chunk is None else _CHUNKS[chunk % len(_CHUNKS)]


def _chunk(span: Span) -> int | None:
    op = Op.find(span.name)
    return None if op is None else op.chunk


def _is_counts(span: Span) -> bool:
    op = Op.find(span.name)
    return op is not None and op.kind == OpKind.COUNTS
