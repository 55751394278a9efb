"""The trace's structure, event by event."""

import json

from hypothesis import given
from hypothesis import strategies as st

from megatron_lancet.lab.views.lanes import levels, message_levels, message_rows
from megatron_lancet.lab.views.trace_file import trace, write_trace
from megatron_lancet.report.timeline_record import TimelineRecord
from megatron_lancet.schedule.timeline import Lane, RankTimeline, Span

STEP = RankTimeline(
    3,
    (
        Span("L2.c0.F.attention", Lane.COMPUTE, 0.0, 1.5),
        Span("L2.c0.F.dispatch", Lane.COMM, 1.5, 4.0, 2048),
        Span("L2.c1.F.attention", Lane.COMPUTE, 1.5, 3.0),
        Span("L2.c1.F.dispatch", Lane.COMM, 3.0, 5.0, 1024),
        Span("L2.c0.F.dispatch", Lane.WAIT, 3.0, 4.0),
        Span("L2.W.self_attention.linear_qkv", Lane.COMPUTE, 4.0, 4.5),
    ),
    6.0,
)
RECORD = TimelineRecord(
    "two chunks", measured=(STEP,), predicted=(RankTimeline(3, STEP.spans[:1], 1.5),), ep_groups=((0, 1), (2, 3))
)


COMPUTES = {"lane": "compute", "device": 0, "stream": 7}


def sliced(name, cat, tid, ts, dur, args, **more):
    return {"ph": "X", "name": name, "cat": cat, "pid": 3, "tid": tid, "ts": ts, "dur": dur, "args": args, **more}


def sends(stream, num_bytes):
    """Fields of the kernel of an all-to-all of group 2, 3."""
    collective = {"Collective name": "all_to_allv", "dtype": "Byte", "In msg nelems": num_bytes}
    collective["Out msg nelems"] = num_bytes
    group = {"Process Group Name": "EXPERT_MODEL_PARALLEL_GROUP 2", "Group size": 2}
    where = {"bytes": num_bytes, "lane": "comm", "device": 0, "stream": stream}
    return {**where, **collective, **group, "Process Group Ranks": "[2, 3]"}


def args_of(chunk):
    return {"layer": 2, "chunk": chunk, "phase": "F"}


def words(chunk, kind):
    return f"layer 2, chunk {chunk}, forward, {kind}"


def test_trace_file_equals_the_golden_one():
    content = json.loads(json.dumps(trace(RECORD)))
    assert content.keys() == {"traceEvents", "displayTimeUnit", "otherData"}
    assert content["displayTimeUnit"] == "ms"
    events = [event for event in content["traceEvents"] if event["pid"] == 3]
    names = [(event["name"], event["tid"], event["args"]) for event in events if event["ph"] == "M"]
    assert names == [
        ("process_name", 0, {"name": "rank 3 measured"}),
        ("process_sort_index", 0, {"sort_index": 3}),
        ("thread_name", 1, {"name": "compute"}),
        ("thread_sort_index", 1, {"sort_index": 1}),
        ("thread_name", 2, {"name": "communication"}),
        ("thread_sort_index", 2, {"sort_index": 2}),
        ("thread_name", 3, {"name": "communication 2"}),
        ("thread_sort_index", 3, {"sort_index": 3}),
    ]
    weight = "L2.W.self_attention.linear_qkv"
    weight_args = {"op": "layer 2, backward (weight gradient), self_attention.linear_qkv", "layer": 2, "phase": "W"}
    dispatch, second = ({"op": words(chunk, "dispatch"), **args_of(chunk)} for chunk in (0, 1))
    assert [event for event in events if event["ph"] == "X"] == [
        sliced("L2.c0.F.attention", "kernel", 1, 0, 1500, {"op": words(0, "attention"), **args_of(0), **COMPUTES}),
        sliced("L2.c1.F.attention", "kernel", 1, 1500, 1500, {"op": words(1, "attention"), **args_of(1), **COMPUTES}),
        sliced(
            "L2.c0.F.dispatch",
            "wait",
            1,
            3000,
            1000,
            {**dispatch, "lane": "wait", "waits_for": "L2.c0.F.dispatch"},
            cname="terrible",
        ),
        sliced(weight, "kernel", 1, 4000, 500, {**weight_args, **COMPUTES}),
        sliced("L2.c0.F.dispatch", "kernel", 2, 1500, 2500, {**dispatch, **sends(20, 2048)}),
        sliced("L2.c1.F.dispatch", "kernel", 3, 3000, 2000, {**second, **sends(21, 1024)}),
    ]
    arrow = {"name": "L2.c0.F.dispatch", "cat": "waits_for", "id": "3.1", "pid": 3}
    assert [event for event in events if event["ph"] in "sf"] == [
        {"ph": "s", **arrow, "tid": 2, "ts": 1500},
        {"ph": "f", "bp": "e", **arrow, "tid": 1, "ts": 3000},
    ]


def test_trace_file_shows_the_prediction_as_another_process():
    events = trace(RECORD)["traceEvents"]
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert list(processes.values()) == ["rank 3 measured", "rank 3 predicted"]
    assert len(processes) == 2


def test_trace_arrow_starts_at_the_message_of_its_micro_batch():
    spans = (
        Span("L1.c0.F.combine", Lane.COMM, 0, 2, 8),
        Span("L1.c0.F.combine", Lane.WAIT, 1, 2),
        Span("L1.c0.F.combine", Lane.COMM, 10, 12, 8),
        Span("L1.c0.F.combine", Lane.WAIT, 11, 12),
        Span("gather", Lane.WAIT, 12, 13),
    )
    events = trace(TimelineRecord("", (RankTimeline(0, spans, 13),)))["traceEvents"]
    assert [event["ts"] for event in events if event["ph"] == "s"] == [0, 10_000]
    assert len({event["id"] for event in events if event["ph"] == "f"}) == 2


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=40))
def test_trace_spans_of_a_level_never_overlap(places):
    spans = [Span("m", Lane.COMM, start, start + ms) for start, ms in sorted(places)]
    chosen = levels(spans)
    for index, span in enumerate(spans):
        others = [other for other, level in zip(spans[:index], chosen, strict=False) if level == chosen[index]]
        assert all(other.end_ms <= span.start_ms for other in others)
    longest = [span for span in spans if span.ms > 0]
    together = max((sum(o.start_ms <= s.start_ms < o.end_ms for o in longest) for s in spans), default=0)
    assert max(chosen, default=-1) + 1 <= together + 1


def test_trace_file_is_written_atomically(tmp_path):
    write_trace(RECORD, tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text()) == json.loads(json.dumps(trace(RECORD)))
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]


def messages(*places):
    return [Span(f"L1.c0.{phase}.dispatch", Lane.COMM, start, end) for phase, start, end in places]


def test_messages_of_both_passes_of_a_pair_have_own_levels():
    beside = messages(("F", 0, 4), ("I", 1, 3), ("F", 2, 5), ("I", 3, 6), ("F", 7, 8), ("I", 9, 10))
    assert message_levels(beside) == [0, 2, 1, 2, 0, 2]
    one_after_the_other = messages(("F", 0, 4), ("F", 2, 5), ("I", 5, 6), ("I", 5, 7), ("F", 7, 8))
    assert message_levels(one_after_the_other) == levels(one_after_the_other) == [0, 1, 0, 1, 0]


def test_messages_of_two_hops_are_on_rows_of_their_own():
    messages = [
        Span(name, Lane.COMM, start_ms, start_ms + 10.0)
        for name, start_ms in (
            ("L1.c0.F.counts", 0.0),
            ("L1.c0.F.node_dispatch", 1.0),
            ("L1.c1.F.node_dispatch", 2.0),
            ("L1.c0.F.local_dispatch", 3.0),
            ("reduce L1", 11.0),
            ("L1.c0.F.local_combine", 13.0),
            ("L1.c0.F.node_combine", 14.0),
        )
    ]
    rows, titles = message_rows(messages)
    assert titles == ["communication", "between nodes", "between nodes 2", "inside a node"]
    assert rows == [0, 1, 2, 3, 0, 3, 1]
    plain = [message for message in messages if message.name in ("L1.c0.F.counts", "reduce L1")]
    assert message_rows(plain) == ([0, 0], ["communication"])
    assert message_rows([]) == ([], [])
    record = TimelineRecord("hops", measured=(RankTimeline(0, tuple(messages), 30.0),), ranks_per_node=2)
    named = [event["args"]["name"] for event in trace(record)["traceEvents"] if event["name"] == "thread_name"]
    assert named == ["compute", *titles]
