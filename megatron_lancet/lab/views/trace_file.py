"""Reads and writes trace.json for Perfetto (ui.perfetto.dev) and chrome://tracing, with the op names of plans.

Each rank has one process for the measured step and one for the predicted step. Threads: compute, where waits are red,
and communication: as many as messages were in flight at once, since the slices of a thread must not cross. Messages
between nodes and inside a node, which two hops have, are on threads of their own. An arrow connects the launch of a
message with each wait for it. Compute and messages have the fields of kernels on streams (``kernel_fields.py``), so
that tools for GPU traces recognise them. The field ``otherData``, which viewers ignore, holds the rest of the record,
so that :func:`read_trace` returns what was written.
"""

import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from megatron_lancet.files.atomic import atomic_write
from megatron_lancet.files.reader import Range, RecordError, from_plain, parse_object, read_text, take_version
from megatron_lancet.files.records import to_plain
from megatron_lancet.lab.views.kernel_fields import category, kernel_args
from megatron_lancet.lab.views.lanes import message_rows
from megatron_lancet.report.compared import Compared
from megatron_lancet.report.timeline_record import TimelineRecord
from megatron_lancet.schedule.ops import Op
from megatron_lancet.schedule.timeline import Lane, RankTimeline, Span

TRACE_FILE = "trace.json"
TRACE_VERSION = 1

_PREDICTED_PID = 1_000_000
"""Added to the rank of a predicted process: no measured rank has such an id."""
_COMPUTE_THREAD = 1
_FIRST_COMM_THREAD = 2
_WAIT_COLOUR = "terrible"
"""The viewer's name for its red."""
_MAX_MESSAGE = 300


@dataclass(frozen=True)
class _Process:
    """Process id of a rank's timeline."""

    pid: int
    rank: int
    step_ms: float


@dataclass(frozen=True)
class _Waits:
    """A rank's step under the previous plan: op name, start and end in ms of each wait."""

    rank: int
    step_ms: float
    waits: tuple[tuple[str, float, float], ...]


@dataclass(frozen=True)
class _OtherData:
    """Part of :class:`TimelineRecord` that is not in the events."""

    title: str
    measured: tuple[_Process, ...]
    predicted: tuple[_Process, ...]
    before: tuple[_Waits, ...]
    ep_groups: tuple[tuple[int, ...], ...]
    reasons: dict[str, str] | None
    ranks_per_node: int | None = None
    about: str = ""
    step: int | None = None
    compared: Compared | None = None


_Microseconds = Annotated[float, Range(0, 10**15)]


@dataclass(frozen=True)
class _Slice:
    """The fields of an event of kind X that are read."""

    name: str
    lane: Lane
    pid: int
    ts: Annotated[float, Range(-(10**15), 10**15)]
    dur: _Microseconds
    bytes: int = 0


def trace(record: TimelineRecord) -> dict[str, Any]:
    """Returns the trace of a record with aligned clocks for ``json.dumps``: object form, times in microseconds."""
    events: list[dict[str, Any]] = []
    processes: dict[str, list[_Process]] = {"measured": [], "predicted": []}
    for word, first_pid, timelines in (
        ("measured", 0, record.measured),
        ("predicted", _PREDICTED_PID, record.predicted),
    ):
        for timeline in timelines:
            pid = first_pid + timeline.rank
            events += _process(pid, f"rank {timeline.rank} {word}", timeline, record.ep_groups)
            processes[word].append(_Process(pid, timeline.rank, timeline.step_ms))
    other = _OtherData(
        title=record.title,
        measured=tuple(processes["measured"]),
        predicted=tuple(processes["predicted"]),
        before=tuple(_Waits(one.rank, one.step_ms, _waits(one)) for one in record.before),
        ep_groups=record.ep_groups,
        reasons=record.reasons,
        ranks_per_node=record.ranks_per_node,
        about=record.about,
        step=record.step,
        compared=record.compared,
    )
    other_data = {"version": TRACE_VERSION, **to_plain(other)}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other_data}


def _waits(timeline: RankTimeline) -> tuple[tuple[str, float, float], ...]:
    return tuple((span.name, span.start_ms, span.end_ms) for span in timeline.spans if span.lane is Lane.WAIT)


def write_trace(record: TimelineRecord, path: Path) -> None:
    """Writes :func:`trace` into ``path`` atomically."""
    atomic_write(path, json.dumps(trace(record), separators=(",", ":")))


def read_trace(path: Path) -> TimelineRecord:
    """Reads the record that :func:`write_trace` wrote; ``before`` has the waits only.

    Raises:
        RecordError: the file can't be read, is no trace of this package, or has another version.
    """
    value = parse_object(read_text(path), str(path))
    other, events = value.get("otherData"), value.get("traceEvents")
    if not isinstance(other, dict) or not isinstance(events, list):
        raise RecordError(f"{path}: expected a trace with traceEvents and otherData")
    take_version(other, TRACE_VERSION, "the trace", f"{path}.otherData")
    content = from_plain(_OtherData, other, f"{path}.otherData")
    spans = _spans(events, str(path))
    pids = [process.pid for process in content.measured + content.predicted]
    if len(set(pids)) != len(pids) or spans.keys() - set(pids):
        raise RecordError(f"{path}.otherData: expected each process of the events once, found {pids}"[:_MAX_MESSAGE])
    measured, predicted = (
        tuple(RankTimeline(process.rank, tuple(spans.get(process.pid, ())), process.step_ms) for process in processes)
        for processes in (content.measured, content.predicted)
    )
    before = tuple(
        RankTimeline(one.rank, tuple(Span(name, Lane.WAIT, start, end) for name, start, end in one.waits), one.step_ms)
        for one in content.before
    )
    rest = content.ep_groups, content.reasons, content.ranks_per_node, content.about, content.step, content.compared
    return TimelineRecord(content.title, measured, predicted, before, *rest)


def _spans(events: Sequence[Any], where: str) -> dict[int, list[Span]]:
    """Returns the spans of each process, ordered by start."""
    spans: dict[int, list[Span]] = {}
    for index, event in enumerate(events):
        place = f"{where}.traceEvents[{index}]"
        if not isinstance(event, dict):
            raise RecordError(f"{place}: expected an object, found {event!r}"[:_MAX_MESSAGE])
        if event.get("ph") != "X":
            continue
        args = event.get("args")
        fields = {name: part for name, part in event.items() if name in ("name", "pid", "ts", "dur")}
        known = args if isinstance(args, dict) else {}
        fields |= {name: part for name, part in known.items() if name in ("lane", "bytes")}
        one = from_plain(_Slice, fields, place)
        span = Span(one.name, one.lane, one.ts / 1e3, (one.ts + one.dur) / 1e3, one.bytes)
        spans.setdefault(one.pid, []).append(span)
    return {pid: sorted(own, key=lambda span: span.start_ms) for pid, own in spans.items()}


def _process(pid: int, name: str, timeline: RankTimeline, groups: Sequence[Sequence[int]]) -> Iterator[dict[str, Any]]:
    messages = [span for span in timeline.spans if span.lane is Lane.COMM]
    row_of, titles = message_rows(messages)
    yield _named("process_name", pid, 0, {"name": name})
    yield _named("process_sort_index", pid, 0, {"sort_index": pid})
    yield _named("thread_name", pid, _COMPUTE_THREAD, {"name": "compute"})
    yield _named("thread_sort_index", pid, _COMPUTE_THREAD, {"sort_index": _COMPUTE_THREAD})
    for row, title in enumerate(titles):
        thread = _FIRST_COMM_THREAD + row
        yield _named("thread_name", pid, thread, {"name": title})
        yield _named("thread_sort_index", pid, thread, {"sort_index": thread})
    for span in timeline.spans:
        if span.lane is not Lane.COMM:
            yield _slice(pid, _COMPUTE_THREAD, span, kernel_args(span, 0, timeline.rank, groups))
    for span, row in zip(messages, row_of, strict=True):
        yield _slice(pid, _FIRST_COMM_THREAD + row, span, kernel_args(span, row, timeline.rank, groups))
    yield from _arrows(pid, timeline.spans, messages, row_of)


def _named(kind: str, pid: int, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


def _slice(pid: int, tid: int, span: Span, of_kernel: Mapping[str, Any]) -> dict[str, Any]:
    op = Op.find(span.name)
    known: dict[str, Any] = {"op": span.name}
    if op is not None:
        known = {"op": op.description(), "layer": op.layer, "chunk": op.chunk, "tile": op.tile, "phase": op.phase}
    args: dict[str, Any] = {name: value for name, value in known.items() if value is not None}
    args |= {"lane": span.lane.value, **of_kernel}
    event: dict[str, Any] = {"ph": "X", "name": span.name, "cat": category(span), "pid": pid, "tid": tid}
    event |= {"ts": _us(span.start_ms), "dur": _us(span.ms), "args": args}
    if span.lane is Lane.WAIT:
        event["cname"] = _WAIT_COLOUR
        args["waits_for"] = span.name
    if span.lane is Lane.COMM:
        args["bytes"] = span.num_bytes
    return event


def _arrows(
    pid: int, spans: Sequence[Span], messages: Sequence[Span], row_of: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Yields an arrow to each wait from the last message of its name that was launched before."""
    launched: dict[str, list[tuple[float, int]]] = {}
    for message, row in zip(messages, row_of, strict=True):
        launched.setdefault(message.name, []).append((message.start_ms, row))
    number = 0
    for wait in (span for span in spans if span.lane is Lane.WAIT):
        candidates = launched.get(wait.name, [])
        position = bisect_right(candidates, wait.start_ms, key=lambda start_and_row: start_and_row[0])
        if position == 0:
            continue
        start_ms, row = candidates[position - 1]
        number += 1
        common = {"name": wait.name, "cat": "waits_for", "id": f"{pid}.{number}", "pid": pid}
        yield {"ph": "s", **common, "tid": _FIRST_COMM_THREAD + row, "ts": _us(start_ms)}
        yield {"ph": "f", "bp": "e", **common, "tid": _COMPUTE_THREAD, "ts": _us(wait.start_ms)}


def _us(ms: float) -> float:
    return round(ms * 1e3, 3)
