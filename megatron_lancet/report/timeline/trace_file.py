"""trace.json for Perfetto (ui.perfetto.dev) and chrome://tracing, with the names of plans and reports.

A process for each rank's step as measured, one for it as predicted. Threads: compute, where waits are red, and
communication: as many as messages were on their way at once, since a thread's slices must not cross. An arrow leads
from a message's issue to each wait for it.
"""

import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_lancet.files import atomic_write
from megatron_lancet.report.timeline.lanes import levels
from megatron_lancet.report.timeline.timeline_file import TimelineRecord
from megatron_lancet.schedule.ops import Op
from megatron_lancet.schedule.timeline import Lane, RankTimeline, Span

TRACE_FILE = "trace.json"

_PREDICTED_PID = 1_000_000
"""Added to the rank: a process id that no measured rank has."""
_COMPUTE_THREAD = 1
_FIRST_COMM_THREAD = 2
_WAIT_COLOUR = "terrible"
"""The viewer's name for its red."""


def trace(record: TimelineRecord) -> dict[str, Any]:
    """The trace as ``json.dumps`` takes it: the format's object form, times in microseconds.

    Args:
        record: with its clocks aligned.
    """
    events: list[dict[str, Any]] = []
    for word, first_pid, timelines in (
        ("measured", 0, record.measured),
        ("predicted", _PREDICTED_PID, record.predicted),
    ):
        for timeline in timelines:
            pid = first_pid + timeline.rank
            events += _process(pid, f"rank {timeline.rank} {word}", timeline)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"title": record.title}}


def write_trace(record: TimelineRecord, path: Path) -> None:
    """Write :func:`trace` into ``path``; a reader never sees half a file."""
    atomic_write(path, json.dumps(trace(record), separators=(",", ":")))


def _process(pid: int, name: str, timeline: RankTimeline) -> Iterator[dict[str, Any]]:
    messages = [span for span in timeline.spans if span.lane is Lane.COMM]
    level_of = levels(messages)
    yield _named("process_name", pid, 0, {"name": name})
    yield _named("process_sort_index", pid, 0, {"sort_index": pid})
    yield _named("thread_name", pid, _COMPUTE_THREAD, {"name": "compute"})
    yield _named("thread_sort_index", pid, _COMPUTE_THREAD, {"sort_index": _COMPUTE_THREAD})
    for level in range(max(level_of, default=-1) + 1):
        thread = _FIRST_COMM_THREAD + level
        yield _named("thread_name", pid, thread, {"name": f"communication {level + 1}" if level else "communication"})
        yield _named("thread_sort_index", pid, thread, {"sort_index": thread})
    for span in timeline.spans:
        if span.lane is not Lane.COMM:
            yield _slice(pid, _COMPUTE_THREAD, span)
    for span, level in zip(messages, level_of, strict=True):
        yield _slice(pid, _FIRST_COMM_THREAD + level, span)
    yield from _arrows(pid, timeline.spans, messages, level_of)


def _named(kind: str, pid: int, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


def _slice(pid: int, tid: int, span: Span) -> dict[str, Any]:
    op = Op.find(span.name)
    known: dict[str, Any] = {"op": span.name}
    if op is not None:
        known = {"op": op.in_words(), "layer": op.layer, "chunk": op.chunk, "phase": op.phase}
    args: dict[str, Any] = {name: value for name, value in known.items() if value is not None}
    event: dict[str, Any] = {"ph": "X", "name": span.name, "cat": span.lane.value, "pid": pid, "tid": tid}
    event |= {"ts": _us(span.start_ms), "dur": _us(span.ms), "args": args}
    if span.lane is Lane.WAIT:
        event["cname"] = _WAIT_COLOUR
        args["waits_for"] = span.name
    if span.lane is Lane.COMM:
        args["bytes"] = span.num_bytes
    return event


def _arrows(
    pid: int, spans: Sequence[Span], messages: Sequence[Span], level_of: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """From each message to the waits for it: the last message of that name that was issued before the wait."""
    issued: dict[str, list[tuple[float, int]]] = {}
    for message, level in zip(messages, level_of, strict=True):
        issued.setdefault(message.name, []).append((message.start_ms, level))
    number = 0
    for wait in (span for span in spans if span.lane is Lane.WAIT):
        candidates = issued.get(wait.name, [])
        position = bisect_right(candidates, wait.start_ms, key=lambda start_and_level: start_and_level[0])
        if position == 0:
            continue
        start_ms, level = candidates[position - 1]
        number += 1
        common = {"name": wait.name, "cat": "waits_for", "id": f"{pid}.{number}", "pid": pid}
        yield {"ph": "s", **common, "tid": _FIRST_COMM_THREAD + level, "ts": _us(start_ms)}
        yield {"ph": "f", "bp": "e", **common, "tid": _COMPUTE_THREAD, "ts": _us(wait.start_ms)}


def _us(ms: float) -> float:
    return round(ms * 1e3, 3)
