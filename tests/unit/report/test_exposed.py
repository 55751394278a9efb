import json

import pytest

from megatron_lancet.report.exposed import exposed_table
from megatron_lancet.report.summary import StepRecord, as_text, rank_medians, summarise
from megatron_lancet.runtime.comm_stats import CommTimes
from megatron_lancet.schedule.ops import Phase
from megatron_lancet.schedule.timeline import Lane, RankTimeline, Span


def rank(number, **waits_ms):
    """A rank that waits; ``L1_c0_F_dispatch=3`` stands for 3 ms for that message."""
    spans, now_ms = [Span("L1.c0.F.attention", Lane.COMPUTE, 0, 5), Span("L1.c0.F.dispatch", Lane.COMM, 5, 9, 8)], 5.0
    for name, ms in waits_ms.items():
        spans.append(Span(name.replace("_", "."), Lane.WAIT, now_ms, now_ms + ms))
        now_ms += ms
    return RankTimeline(number, tuple(spans), now_ms)


NOW = [
    rank(0, L1_c0_F_dispatch=2, L1_c1_F_combine=1, L3_c0_I_dispatch=4, gather=1),
    rank(1, L1_c0_F_dispatch=4, L3_c0_I_dispatch=2),
]
PREDICTED = [rank(0, L1_c0_F_dispatch=2.5, L1_c1_F_dispatch=0.5)]
BEFORE = [rank(0, L1_c0_F_dispatch=10, L2_c0_F_dispatch=7), rank(1, L1_c0_F_dispatch=20, L2_c0_F_dispatch=9)]
REASONS = {"L3.c0.I.dispatch": "nothing left to run", "L1.c0.F.dispatch": "everything else depends on it"}


def test_exposed_time_is_a_mean_over_ranks_by_layer_and_chunk():
    table = exposed_table(NOW, PREDICTED, BEFORE, REASONS)
    figures = {(part.layer, part.chunk): (part.before_ms, part.measured_ms, part.predicted_ms) for part in table.chunks}
    assert figures == {
        (1, 0): (15, 3, 2.5),
        (1, 1): (0, 0.5, 0.5),
        (2, 0): (8, 0, 0),
        (3, 0): (0, 3, 0),
        (None, None): (0, 0.5, 0),
    }
    assert list(figures) == [(1, 0), (1, 1), (2, 0), (3, 0), (None, None)]
    assert (table.before_ms, table.measured_ms, table.predicted_ms) == (23, 7, 3)
    assert table.measured_ms == sum(part.measured_ms for part in table.chunks)
    assert (table.measured_in(Phase.FORWARD), table.measured_in(Phase.INPUT_GRAD)) == (3.5, 3)
    first = table.chunks[0].messages[0]
    assert (first.op, first.measured_ms, first.reason) == ("L1.c0.F.dispatch", 3, "everything else depends on it")


def test_exposed_time_of_a_chunk_adds_up_its_tiles():
    table = exposed_table([rank(0, L1_c0_t0_F_dispatch=2, L1_c0_t1_F_dispatch=3, L1_c0_t1_I_combine=4)])
    (chunk,) = table.chunks
    assert (chunk.layer, chunk.chunk, chunk.measured_ms) == (1, 0, 9)
    assert table.measured_by_kind() == {"dispatch": 5, "combine": 4}
    assert [message.op for message in chunk.messages][1] == "L1.c0.t1.F.dispatch"


def test_unknown_exposed_time_is_none_and_not_zero():
    table = exposed_table(NOW)
    assert table.predicted_ms is None
    assert table.before_ms is None
    assert all(part.predicted_ms is None and part.before_ms is None for part in table.chunks)
    assert all(message.reason is None for part in table.chunks for message in part.messages)


def test_exposed_text_sums_layers_and_sorts_by_wait():
    lines = exposed_table(NOW, PREDICTED, BEFORE, REASONS).as_text().splitlines()
    assert lines[2].split() == ["1", "all", "15.00", "3.50", "3.00"]
    assert lines[3].split() == ["0", "15.00", "3.00", "2.50"]
    assert lines[-5].split() == ["all", "23.00", "7.00", "3.00"]
    assert lines[-4] == "  of it 3.50 for messages of forwards, 3.00 for messages of backwards"
    assert lines[-3] == "  of it by message: dispatch 6.00, combine 0.50, gather 0.50"
    assert lines[-2] == "  L1.c0.F.dispatch: 3.00 ms, everything else depends on it"
    assert lines[-1] == "  L3.c0.I.dispatch: 3.00 ms, 0.00 ms predicted"


def test_exposed_text_of_a_fixed_plan_has_no_empty_columns():
    lines = exposed_table(NOW, step=12).as_text().splitlines()
    assert lines[0] == (
        "exposed ms of traced step 12, which took 13.0 ms (one step; the figures above are medians), mean over ranks"
    )
    assert lines[1].split() == ["layer", "chunk", "now"]
    assert lines[-3].split() == ["all", "7.00"]
    predicted = exposed_table(NOW, PREDICTED).as_text().splitlines()
    assert predicted[1].split() == ["layer", "chunk", "now", "predicted"]


def test_exposed_text_counts_many_reasons():
    waits = {f"L{layer}_c0_F_dispatch": layer for layer in range(1, 12)}
    reasons = {name.replace("_", "."): "memory" for name in waits}
    assert exposed_table([rank(0, **waits)], reasons=reasons).as_text().endswith("  and 3 more")


def test_report_has_the_exposed_table_where_there_is_one():
    ranks = [rank_medians([StepRecord(100, 2048, CommTimes())] * 5)]
    plain = summarise(ranks, "chunks=2", 5)
    assert "exposed" not in plain
    table = exposed_table(NOW, PREDICTED, BEFORE, REASONS)
    report = summarise(ranks, "chunks=2", 5, exposed=table)
    assert {name: value for name, value in report.items() if name != "exposed"} == plain
    text = as_text(json.loads(json.dumps(report)))
    assert text.startswith(as_text(plain))
    assert "  L1.c0.F.dispatch: 3.00 ms, everything else depends on it" in text
    assert report["exposed"]["chunks"][0]["before_ms"] == pytest.approx(15)
