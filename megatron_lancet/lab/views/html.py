"""Writes timeline.html: the timelines of a step as one self-contained page that needs no network.

The parts of the page are in ``page/``. The data is embedded as JSON that can't end its script element.
"""

import html
import json
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from megatron_lancet.files.atomic import atomic_write
from megatron_lancet.lab.views.bars import step_bars
from megatron_lancet.lab.views.lanes import message_rows
from megatron_lancet.report.exposed import exposed_table
from megatron_lancet.report.timeline_record import TimelineRecord
from megatron_lancet.schedule.ops import COMBINES, DISPATCHES, Op, OpKind
from megatron_lancet.schedule.timeline import Lane, RankTimeline, Span

TIMELINE_PAGE = "timeline.html"

_SCRIPTS = ("data.js", "lanes.js", "view.js", "panel.js", "main.js")
_MS_DIGITS = 4


def page(record: TimelineRecord) -> str:
    """Returns the page of a record whose clocks are aligned."""
    parts = resources.files("megatron_lancet.lab.views") / "page"
    filling = {
        "TITLE": html.escape(record.about or record.title),
        "PLAN": html.escape(record.title) if record.about else "",
        "STEP": "" if record.step is None else f" {record.step}",
        "BARS": step_bars(record),
        "STYLE": (parts / "timeline.css").read_text(),
        "DATA": _script_safe(_data(record)),
        "SCRIPT": "\n".join((parts / name).read_text() for name in _SCRIPTS),
    }
    template = (parts / "timeline.html").read_text()
    return re.sub(r"@@(\w+)@@", lambda match: filling[match[1]], template)


def write_page(record: TimelineRecord, path: Path) -> None:
    """Writes :func:`page` into ``path`` atomically."""
    atomic_write(path, page(record))


def _script_safe(value: Any) -> str:
    """Returns JSON without HTML's special characters, so that no text in it can end the element or open another."""
    text = json.dumps(value, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _data(record: TimelineRecord) -> dict[str, Any]:
    every = (*record.measured, *record.predicted)
    index_of: dict[str, int] = {}
    for timeline in every:
        for span in timeline.spans:
            index_of.setdefault(span.name, len(index_of))
    reasons = record.reasons or {}
    table = exposed_table(record.measured, record.predicted, record.before, record.reasons)
    return {
        "title": record.title,
        "names": [_name(name, reasons.get(name)) for name in index_of],
        "groups": [
            *(_group(timeline, "measured", index_of) for timeline in record.measured),
            *(_group(timeline, "predicted", index_of) for timeline in record.predicted),
        ],
        "exposed": {
            "rows": [
                [c.layer, c.chunk, c.before_ms, c.measured_ms if record.measured else None, c.predicted_ms]
                for c in table.chunks
            ],
            "all": [table.before_ms, table.measured_ms if record.measured else None, table.predicted_ms],
        },
    }


def _name(name: str, reason: str | None) -> dict[str, Any]:
    op = Op.find(name)
    return {
        "text": name,
        "words": name if op is None else op.description(),
        "layer": None if op is None else op.layer,
        "chunk": None if op is None else op.chunk,
        "tile": None if op is None else op.tile,
        "phase": None if op is None else op.phase,
        "kind": None if op is None else _colour_of(op.kind),
        "reason": reason,
    }


def _colour_of(kind: str) -> OpKind | None:
    """The kind of message that has the page's colour for this one; None for what is no message."""
    if kind in DISPATCHES:
        return OpKind.DISPATCH
    if kind in COMBINES:
        return OpKind.COMBINE
    return OpKind.COUNTS if kind == OpKind.COUNTS else None


def _group(timeline: RankTimeline, source: str, index_of: dict[str, int]) -> dict[str, Any]:
    """Returns a rank's lanes. The spans of a track don't overlap, so the page finds those in view by bisection."""
    messages = [span for span in timeline.spans if span.lane is Lane.COMM]
    row_of, titles = message_rows(messages)
    comm = [
        {"title": title, **_track([span for span, own in zip(messages, row_of, strict=True) if own == row], index_of)}
        for row, title in enumerate(titles)
    ]
    return {
        "rank": timeline.rank,
        "source": source,
        "stepMs": timeline.step_ms,
        "exposedMs": timeline.exposed_ms(),
        "compute": _track([span for span in timeline.spans if span.lane is Lane.COMPUTE], index_of),
        "wait": _track([span for span in timeline.spans if span.lane is Lane.WAIT], index_of),
        "comm": comm,
    }


def _track(spans: Sequence[Span], index_of: dict[str, int]) -> dict[str, list[Any]]:
    return {
        "name": [index_of[span.name] for span in spans],
        "start": [round(span.start_ms, _MS_DIGITS) for span in spans],
        "ms": [round(span.ms, _MS_DIGITS) for span in spans],
        "bytes": [span.num_bytes for span in spans],
    }
