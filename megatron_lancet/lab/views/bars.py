"""Draws a step without overlap as a bar above a step under the plan."""

import html
import statistics
from collections.abc import Sequence

from megatron_lancet.report.timeline_record import TimelineRecord
from megatron_lancet.schedule.timeline import RankTimeline


def step_bars(record: TimelineRecord) -> str:
    """Returns the bars as HTML with a sentence; empty where no step without overlap was measured.

    The medians of steps measured in turns are drawn; without these the traced steps.
    """
    compared = record.compared
    if compared is not None:
        stock = compared.no_overlap_ms, compared.no_overlap_exposed_ms
        own = compared.own_ms, compared.own_exposed_ms
        source = f"medians of {compared.num_steps} steps each, measured {compared.how}"
    elif record.before and record.measured:
        stock, own = _step(record.before), _step(record.measured)
        source = "one traced step each"
    else:
        return ""
    if stock == own:
        shares = f"{stock[0]:.1f} ms a step, {100 * stock[1] / stock[0]:.0f} % of it waiting (striped)"
        return f"{_bars([('without overlap', stock)])}<p>No plan was faster than no overlap: {shares}, {source}.</p>"
    bars = _bars([("without overlap", stock), ("under the plan", own)])
    gain = f"<strong>{stock[0] / own[0]:.2f}x as fast</strong>: {stock[0]:.1f} ms a step without "
    gain += f"overlap, {100 * stock[1] / stock[0]:.0f} % of it waiting (striped); {own[0]:.1f} ms under the plan, "
    return f"{bars}<p>{gain}{100 * own[1] / own[0]:.0f} % ({source}).</p>"


def _step(timelines: Sequence[RankTimeline]) -> tuple[float, float]:
    """Step and exposed time in ms."""
    exposed_ms = statistics.fmean(timeline.exposed_ms() for timeline in timelines)
    return max(timeline.step_ms for timeline in timelines), exposed_ms


def _bars(steps: Sequence[tuple[str, tuple[float, float]]]) -> str:
    """The bars of named steps, each of step and exposed time in ms."""
    longest_ms = max(step_ms for _, (step_ms, _) in steps)
    rows = "".join(f"<span>{html.escape(name)}</span>{_bar(*times, longest_ms)}" for name, times in steps)
    return f'<div id="bars">{rows}</div>\n  '


def _bar(step_ms: float, exposed_ms: float, longest_ms: float) -> str:
    exposed, compute = (100 * ms / longest_ms for ms in (exposed_ms, step_ms - exposed_ms))
    parts = f'<div class="compute" style="width:{compute:.2f}%"></div>'
    return f'<div class="bar">{parts}<div class="exposed" style="width:{exposed:.2f}%"></div></div>'
