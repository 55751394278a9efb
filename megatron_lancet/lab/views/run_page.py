"""Writes run.html: step time and exposed share over a run in SVG, without a script and without a network."""

import html
import statistics
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from megatron_lancet.files.atomic import atomic_write
from megatron_lancet.files.reader import from_plain
from megatron_lancet.files.report_folder import REPORT_FILE
from megatron_lancet.report.history import StepPoint
from megatron_lancet.report.summary import about

RUN_PAGE = "run.html"
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 1000, 220, 70, 12, 24
_NUM_TICKS = 4
_STYLE = """
svg { width: 100%; max-width: 1200px; height: auto; display: block; }
svg text { fill: var(--quiet); font-size: 12px; }
.tuned { fill: var(--weight-grad); opacity: 0.22; }
.grid { stroke: var(--line); }
.step { fill: none; stroke: var(--forward); stroke-width: 1.3; }
.share { fill: none; stroke: var(--wait); stroke-width: 1.3; }
"""


def run_page(report: Mapping[str, Any]) -> str:
    """Returns the page.

    Args:
        report: the content of ``report.json``.
    """
    points = [from_plain(StepPoint, one, f"{REPORT_FILE}.steps") for one in report["steps"]]
    tuned = [(first, last) for first, last in report.get("tuning", {}).get("steps", [])]
    style = (resources.files("megatron_lancet.lab.views") / "page" / "timeline.css").read_text()
    each = max(point.num_steps for point in points)
    note = f" Each point is a mean over up to {each} steps." if each > 1 else ""
    marked = " Steps of tuning are shaded: profiles, and plans in turns." if tuned else ""
    step = _chart(points, tuned, lambda point: point.step_ms, "step", "ms")
    share = _chart(points, tuned, lambda point: 100 * point.exposed_ms / point.step_ms, "share", "%")
    title, plan = html.escape(about(report["run"])), html.escape(report["plan_text"])
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{style}{_STYLE}</style>
</head>
<body>
<h1>{title}</h1>
<p>{html.escape(report["verdict"])}</p>
<p>Last plan: {plan}</p>
<p>All steps of rank 0.{marked}{note} Values above the plot are drawn at its edge.</p>
<h2>Step time in ms</h2>
{step}
<h2>Exposed share of a step in %</h2>
{share}
</body>
</html>
"""


def write_run_page(report: Mapping[str, Any], folder: Path) -> Path:
    """Writes :func:`run_page` into ``folder``, which it creates, atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / RUN_PAGE
    atomic_write(path, run_page(report))
    return path


def _chart(
    points: Sequence[StepPoint],
    tuned: Sequence[tuple[int, int]],
    value_of: Callable[[StepPoint], float],
    name: str,
    unit: str,
) -> str:
    """Returns a plot by step as SVG. Its height fits all but outliers."""
    values = [value_of(point) for point in points]
    usual = statistics.quantiles(values, n=50)[-1] if len(values) > 1 else values[0]
    top = 1.1 * max(usual, statistics.median(values)) or 1.0
    first, last = points[0].iteration, points[-1].iteration + points[-1].num_steps - 1
    x = lambda step: _LEFT + (step - first) / max(last - first, 1) * (_WIDTH - _LEFT - 10)  # noqa: E731
    y = lambda value: _HEIGHT - _BOTTOM - min(value, top) / top * (_HEIGHT - _BOTTOM - _TOP)  # noqa: E731
    digits = 0 if top >= 2 * _NUM_TICKS else 2
    parts = []
    for begin, end in tuned:
        left, right = x(begin - 0.5), x(end + 0.5)
        parts.append(
            f'<rect class="tuned" x="{left:.1f}" y="{_TOP}" width="{max(right - left, 1):.1f}" '
            f'height="{_HEIGHT - _BOTTOM - _TOP}"><title>tuning, steps {begin} to {end}</title></rect>'
        )
    for tick in range(_NUM_TICKS + 1):
        value = top * tick / _NUM_TICKS
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - 10}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>'
            f'<text x="{_LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:,.{digits}f} {unit}</text>'
        )
    path = " ".join(f"{x(point.iteration):.1f},{y(value):.1f}" for point, value in zip(points, values, strict=True))
    parts.append(f'<polyline class="{name}" points="{path}"/>')
    parts += [
        f'<text x="{_LEFT}" y="{_HEIGHT - 6}">step {first}</text>',
        f'<text x="{_WIDTH - 10}" y="{_HEIGHT - 6}" text-anchor="end">step {last}</text>',
    ]
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{name} by step">{"".join(parts)}</svg>'
