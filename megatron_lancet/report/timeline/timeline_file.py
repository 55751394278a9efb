"""timeline.json: timelines of a step, measured and predicted, as a file. Pages and traces are made of it.

A step has up to 100,000 spans, so the file holds columns and each name once.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from megatron_lancet.files import RecordError, atomic_write, parse_record, read_text, to_plain
from megatron_lancet.schedule.timeline import Lane, RankTimeline, Span

TIMELINE_VERSION = 1
TIMELINE_FILE = "timeline.json"
_MS_DIGITS = 6
"""A nanosecond: no clock here is finer."""


@dataclass(frozen=True)
class TimelineRecord:
    """One training step on several ranks.

    Attributes:
        title: what was run, in a line.
        measured: of each rank, on its own clock. See :func:`megatron_lancet.report.timeline.clocks.aligned`.
        predicted: of the same ranks or some of them; empty if nothing was predicted.
        before: measured under the plan that the run is compared with; empty if there was none.
        ep_groups: ranks that exchange messages with each other; empty where all ranks do.
        reasons: why a message stayed exposed, by its name.
    """

    title: str
    measured: tuple[RankTimeline, ...]
    predicted: tuple[RankTimeline, ...] = ()
    before: tuple[RankTimeline, ...] = ()
    ep_groups: tuple[tuple[int, ...], ...] = ()
    reasons: dict[str, str] | None = None


@dataclass(frozen=True)
class _Columns:
    """The spans of a rank; ``name`` holds indices into the file's names. All other fields: [num_spans]."""

    rank: int
    step_ms: float
    name: tuple[int, ...]
    lane: tuple[Lane, ...]
    start_ms: tuple[float, ...]
    end_ms: tuple[float, ...]
    num_bytes: tuple[int, ...]

    def __post_init__(self) -> None:
        num_spans = {len(self.name), len(self.lane), len(self.start_ms), len(self.end_ms), len(self.num_bytes)}
        if len(num_spans) != 1:
            raise ValueError(f"columns of rank {self.rank} differ in length: {sorted(num_spans)}")
        backwards = [
            index for index, (start, end) in enumerate(zip(self.start_ms, self.end_ms, strict=True)) if end < start
        ]
        if backwards:
            raise ValueError(f"span {backwards[0]} of rank {self.rank} ends before it starts")


@dataclass(frozen=True)
class _Content:
    title: str
    names: tuple[str, ...]
    measured: tuple[_Columns, ...]
    predicted: tuple[_Columns, ...] = ()
    before: tuple[_Columns, ...] = ()
    ep_groups: tuple[tuple[int, ...], ...] = ()
    reasons: dict[str, str] | None = None


def write_timelines(record: TimelineRecord, path: Path) -> None:
    """Write ``record``; a reader never sees half a file."""
    index_of = {name: index for index, name in enumerate(_names([record.measured, record.predicted, record.before]))}
    content = _Content(
        title=record.title,
        names=tuple(index_of),
        measured=_columns(record.measured, index_of),
        predicted=_columns(record.predicted, index_of),
        before=_columns(record.before, index_of),
        ep_groups=record.ep_groups,
        reasons=record.reasons,
    )
    atomic_write(path, json.dumps({"version": TIMELINE_VERSION, **to_plain(content)}, separators=(",", ":")))


def read_timelines(path: Path) -> TimelineRecord:
    """What :func:`write_timelines` wrote.

    Raises:
        RecordError: the file can't be read, holds no timelines, or those of another version.
    """
    content = parse_record(_Content, read_text(path), TIMELINE_VERSION, "the timeline", str(path))
    return TimelineRecord(
        title=content.title,
        measured=_timelines(content.measured, content.names, f"{path}.measured"),
        predicted=_timelines(content.predicted, content.names, f"{path}.predicted"),
        before=_timelines(content.before, content.names, f"{path}.before"),
        ep_groups=content.ep_groups,
        reasons=content.reasons,
    )


def _names(parts: Iterable[tuple[RankTimeline, ...]]) -> dict[str, None]:
    """Each name once, in the order in which they come."""
    return {span.name: None for timelines in parts for timeline in timelines for span in timeline.spans}


def _columns(timelines: tuple[RankTimeline, ...], index_of: dict[str, int]) -> tuple[_Columns, ...]:
    return tuple(
        _Columns(
            rank=timeline.rank,
            step_ms=timeline.step_ms,
            name=tuple(index_of[span.name] for span in timeline.spans),
            lane=tuple(span.lane for span in timeline.spans),
            start_ms=tuple(round(span.start_ms, _MS_DIGITS) for span in timeline.spans),
            end_ms=tuple(round(span.end_ms, _MS_DIGITS) for span in timeline.spans),
            num_bytes=tuple(span.num_bytes for span in timeline.spans),
        )
        for timeline in timelines
    )


def _timelines(parts: tuple[_Columns, ...], names: tuple[str, ...], where: str) -> tuple[RankTimeline, ...]:
    ranks = [part.rank for part in parts]
    if len(set(ranks)) != len(ranks):
        raise RecordError(f"{where}: a rank stands there twice: {ranks}")
    timelines = []
    for position, part in enumerate(parts):
        unknown = [index for index in part.name if not 0 <= index < len(names)]
        if unknown:
            raise RecordError(f"{where}[{position}].name: expected an index below {len(names)}, found {unknown[0]}")
        columns = zip(part.name, part.lane, part.start_ms, part.end_ms, part.num_bytes, strict=True)
        spans = tuple(Span(names[index], lane, start, end, size) for index, lane, start, end, size in columns)
        timelines.append(RankTimeline(part.rank, spans, part.step_ms))
    return tuple(timelines)
