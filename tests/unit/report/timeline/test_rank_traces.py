"""Traces of single ranks, with the fields by which HTA and TraceLens know kernels and collectives."""

import json
import re
from dataclasses import replace
from itertools import pairwise

import pytest

from megatron_lancet.lab.views.rank_traces import hidden_share, rank_trace, write_rank_traces
from megatron_lancet.report.timeline_record import TimelineRecord
from megatron_lancet.schedule.timeline import Lane, RankTimeline, Span

STEP = RankTimeline(
    1,
    (
        Span("L1.c0.F.attention", Lane.COMPUTE, 0.0, 2.0),
        Span("L1.c0.F.counts", Lane.COMM, 1.5, 2.0, 8),
        Span("L1.c0.F.dispatch", Lane.COMM, 2.0, 6.0, 4096),
        Span("L1.c1.F.attention", Lane.COMPUTE, 2.0, 5.0),
        Span("L1.c0.F.dispatch", Lane.WAIT, 5.0, 6.0),
        Span("L1.c0.F.experts", Lane.COMPUTE, 6.0, 7.0),
        Span("reduce 1", Lane.COMM, 6.0, 6.5, 100),
    ),
    8.0,
)
RECORD = TimelineRecord("run", (STEP, replace(STEP, rank=0)), ep_groups=((0, 1),))


def test_kernels_have_the_fields_that_hta_and_tracelens_read():
    content = rank_trace(RECORD, STEP)
    assert content["distributedInfo"] == {"rank": 1, "world_size": 2}
    kernels = [event for event in content["traceEvents"] if event["cat"] == "kernel"]
    computed = [event for event in kernels if not re.match(r"^nccl.*Kernel", event["name"])]
    assert [(event["name"], event["args"]["stream"]) for event in computed] == [
        ("L1.c0.F.attention", 7),
        ("L1.c1.F.attention", 7),
        ("L1.c0.F.experts", 7),
    ]
    messages = {event["args"]["op"]: event for event in kernels if event not in computed}
    dispatch = messages["L1.c0.F.dispatch"]
    assert (dispatch["name"], dispatch["ts"], dispatch["dur"]) == ("ncclDevKernel_all_to_allv", 2000, 4000)
    known = dispatch["args"]
    assert (known["Collective name"], known["In msg nelems"], known["dtype"]) == ("all_to_allv", 4096, "Byte")
    assert known["Process Group Name"] == "EXPERT_MODEL_PARALLEL_GROUP 0", (
        "the same on all its ranks, and no other group's"
    )
    assert (known["Group size"], known["Process Group Ranks"]) == (2, "[0, 1]")
    assert messages["L1.c0.F.counts"]["args"]["Collective name"] == "all_to_all"
    assert messages["reduce 1"]["args"]["Collective name"] == "allreduce"
    assert "Process Group Ranks" not in messages["reduce 1"]["args"], "of these it is not recorded"
    assert len({event["args"]["correlation"] for event in kernels}) == len(kernels)


def kernels_of(record, timeline):
    return [event for event in rank_trace(record, timeline)["traceEvents"] if event.get("cat") == "kernel"]


def test_no_stream_has_two_kernels_at_a_time():
    by_stream: dict[int, list[tuple[float, float]]] = {}
    for event in kernels_of(RECORD, STEP):
        by_stream.setdefault(event["args"]["stream"], []).append((event["ts"], event["ts"] + event["dur"]))
    for kernels in by_stream.values():
        ordered = sorted(kernels)
        assert all(end <= start for (_, end), (start, _) in pairwise(ordered))


def test_message_has_the_same_stream_on_all_ranks():
    """TraceLens refuses traces in which it differs, and takes the n-th message of a group for the same one on all."""
    late = [Span("L1.c0.F.dispatch", Lane.COMM, 5.0, 6.0, 9), Span("L1.c1.F.counts", Lane.COMM, 3.0, 4.0, 8)]
    both = [Span("L1.c0.F.dispatch", Lane.COMM, 1.0, 9.0, 9), Span("L1.c1.F.counts", Lane.COMM, 2.0, 3.0, 8)]
    again = Span("L1.c0.F.dispatch", Lane.COMM, 10.0, 11.0, 9)  # of the next micro-batch
    steps = tuple(
        RankTimeline(rank, tuple(sorted([*spans, again], key=lambda span: span.start_ms)), 12.0)
        for rank, spans in enumerate((late, both))
    )
    found = [kernels_of(TimelineRecord("run", steps, ep_groups=((0, 1),)), step) for step in steps]
    streams = [sorted((one["args"]["op"], one["args"]["stream"]) for one in kernels) for kernels in found]
    assert streams[0] == streams[1]
    assert (
        len({stream for op, stream in streams[0] if op.endswith("dispatch")} & {dict(streams[0])["L1.c1.F.counts"]})
        == 0
    )
    groups = {one["args"]["op"]: one["args"]["Process Group Name"] for one in found[0]}
    assert groups["L1.c0.F.dispatch"] != groups["L1.c1.F.counts"], (
        "they are launched in another order on the other rank"
    )


def test_each_kernel_has_launch_on_host_with_arrow_to_it():
    events = rank_trace(RECORD, STEP)["traceEvents"]
    numbers = [one["args"]["correlation"] for one in kernels_of(RECORD, STEP)]
    for category, number_of in (
        ("cuda_runtime", lambda one: one["args"]["correlation"]),
        ("ac2g", lambda one: one["id"]),
    ):
        own = [number_of(one) for one in events if one.get("cat") == category]
        assert sorted(own) == sorted(numbers * (2 if category == "ac2g" else 1))


def test_first_line_of_a_file_names_its_rank_for_hta(tmp_path):
    paths = write_rank_traces(RECORD, tmp_path)
    assert [path.name for path in paths] == ["rank-1.json", "rank-0.json"]
    for path, timeline in zip(paths, RECORD.measured, strict=True):
        found = re.search(r'"rank":\s+(\d+)', path.read_text().splitlines()[0])
        assert found is not None
        assert int(found.group(1)) == timeline.rank
        assert json.loads(path.read_text()) == rank_trace(RECORD, timeline)


def test_hidden_share_is_that_of_time_in_flight_without_waits():
    assert hidden_share(STEP) == pytest.approx(1 - 1.0 / 5.0)
    assert hidden_share(RankTimeline(0, STEP.spans[:1], 2.0)) == 0.0
