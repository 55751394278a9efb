"""Writes one trace per rank, as Kineto does, for tools that read these: HTA takes the folder, TraceLens the files.

A message has the name of an NCCL kernel, whatever sent it, because these tools recognise communication by its name; the
argument ``op`` is its name in plans and reports. It is on the same stream on all ranks of its group, which TraceLens
compares. Each kernel has an op of the host that launches it where it begins, and an arrow from there: TraceLens leaves
others out. Waits are left out: on a stream they are gaps between kernels.
"""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_lancet.files.atomic import atomic_write
from megatron_lancet.lab.views.kernel_fields import KERNEL, collective_name, kernel_args
from megatron_lancet.lab.views.lanes import message_rows
from megatron_lancet.report.timeline_record import TimelineRecord
from megatron_lancet.schedule.timeline import Lane, RankTimeline, Span

_US_PER_MS = 1e3
_HOST_THREAD = 1
_LAUNCH_US = 0.002
"""Long enough for a call inside of an op, and shorter than any kernel."""

type _Key = tuple[str, int]


def rank_trace(record: TimelineRecord, timeline: RankTimeline) -> dict[str, Any]:
    """Returns the trace of one rank's measured step for ``json.dumps``.

    Args:
        record: with aligned clocks.
        timeline: of the rank.
    """
    rank = timeline.rank
    messages = [span for span in timeline.spans if span.lane is Lane.COMM]
    row_of = _rows_of_group(record, timeline)
    step = {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#0", "pid": rank, "tid": _HOST_THREAD}
    step |= {"ts": 0.0, "dur": _us(timeline.step_ms), "args": {}}
    kernels = [(span, 0) for span in timeline.spans if span.lane is Lane.COMPUTE]
    kernels += zip(messages, (row_of[key] for key in _keys(messages)), strict=True)
    events = []
    for number, (span, row) in enumerate(kernels, start=1):
        kernel = _kernel(record, rank, number, span, row)
        events += [*_launch(rank, span, kernel), kernel]
    ranks = sorted(one.rank for one in record.measured)
    return {
        "schemaVersion": 1,
        "distributedInfo": {"rank": rank, "world_size": len(ranks)},
        "traceEvents": [step, *events],
        "displayTimeUnit": "ms",
    }


def write_rank_traces(record: TimelineRecord, folder: Path) -> list[Path]:
    """Writes ``rank-N.json`` for each measured rank into ``folder``, which must exist; returns the paths."""
    written = []
    for timeline in record.measured:
        path = folder / f"rank-{timeline.rank}.json"
        # HTA looks for '"rank": N' with a blank, at the start of the file.
        atomic_write(path, json.dumps(rank_trace(record, timeline)) + "\n")
        written.append(path)
    return written


def hidden_share(timeline: RankTimeline) -> float:
    """Share of the time with messages in flight in which the rank does not wait for one; 0 without messages."""
    flights, waits = (_merged(timeline, lane) for lane in (Lane.COMM, Lane.WAIT))
    in_flight_ms = sum(end - start for start, end in flights)
    waited_ms = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in flights for b in waits)
    return 1 - waited_ms / in_flight_ms if in_flight_ms > 0 else 0.0


def _merged(timeline: RankTimeline, lane: Lane) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []
    for span in sorted((one for one in timeline.spans if one.lane is lane), key=lambda one: one.start_ms):
        if found and span.start_ms <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], span.end_ms))
        else:
            found.append((span.start_ms, span.end_ms))
    return found


def _rows_of_group(record: TimelineRecord, timeline: RankTimeline) -> dict[_Key, int]:
    """A row for each message, so that on none of them messages overlap on any rank of the rank's group."""
    group = next((ranks for ranks in record.ep_groups if timeline.rank in ranks), (timeline.rank,))
    joint: dict[_Key, Span] = {}
    for one in record.measured:
        if one.rank in group:
            messages = [span for span in one.spans if span.lane is Lane.COMM]
            for key, span in zip(_keys(messages), messages, strict=True):
                before = joint.get(key, span)
                start_ms, end_ms = min(before.start_ms, span.start_ms), max(before.end_ms, span.end_ms)
                joint[key] = Span(span.name, Lane.COMM, start_ms, end_ms)
    ordered = sorted(joint.items(), key=lambda item: item[1].start_ms)
    row_of, _ = message_rows([span for _, span in ordered])
    return {key: row for (key, _), row in zip(ordered, row_of, strict=True)}


def _keys(messages: Sequence[Span]) -> list[_Key]:
    """Name of each message, and how many of this name were before it."""
    seen: Counter[str] = Counter()
    found = []
    for span in messages:
        found.append((span.name, seen[span.name]))
        seen[span.name] += 1
    return found


def _launch(rank: int, span: Span, kernel: dict[str, Any]) -> list[dict[str, Any]]:
    """The host's op that launches a kernel, inside it the call, and an arrow from this; on a thread for each stream."""
    number = kernel["args"]["correlation"]
    place = {"pid": rank, "tid": kernel["tid"], "ts": kernel["ts"]}
    arrow = {"name": "ac2g", "cat": "ac2g", "id": number}
    call = {"ph": "X", "name": "cudaLaunchKernel", "cat": "cuda_runtime", "dur": _LAUNCH_US / 2}
    return [
        {"ph": "X", "name": span.name, "cat": "cpu_op", **place, "dur": _LAUNCH_US, "args": {}},
        {**call, **place, "args": {"correlation": number}},
        {"ph": "s", **arrow, **place},
        {"ph": "f", "bp": "e", **arrow, **place, "pid": kernel["pid"]},
    ]


def _kernel(record: TimelineRecord, rank: int, number: int, span: Span, row: int) -> dict[str, Any]:
    name = span.name
    if span.lane is Lane.COMM:
        name = f"ncclDevKernel_{collective_name(span.name)}"
    args = {**kernel_args(span, row, rank, record.ep_groups), "correlation": number, "op": span.name}
    event = {"ph": "X", "cat": KERNEL, "name": name, "pid": 0, "tid": args["stream"]}
    return {**event, "ts": _us(span.start_ms), "dur": _us(span.ms), "args": args}


def _us(ms: float) -> float:
    return round(ms * _US_PER_MS, 3)
