"""CPU time of small steps: ratios to stock's in the same repeat, and the division of a trace among ops."""

import pytest

from benchmarks.host_time import ms_by_op, plans, table_of_ops, table_of_steps
from megatron_lancet.schedule.timeline import Lane, RankTimeline, Span


def test_a_step_is_divided_among_its_ops():
    spans = (
        Span("L1.c0.F.experts", Lane.COMPUTE, 0.0, 3.0),
        Span("L1.c1.F.experts", Lane.COMPUTE, 3.0, 5.0),
        Span("L1.c0.F.dispatch", Lane.WAIT, 5.0, 6.0),
        Span("L1.c0.F.dispatch", Lane.COMM, 0.0, 6.0),
        Span("L1.c0.I.experts", Lane.COMPUTE, 6.0, 8.0),
        Span("L1.W.experts.0.linear_fc1", Lane.COMPUTE, 8.0, 9.0),
    )
    found = ms_by_op(RankTimeline(0, spans, 10.0))
    assert found == {"F.experts": 5.0, "waits": 1.0, "I.experts": 2.0, "dW": 1.0, "outside ops": 1.0}


def test_ratios_are_to_stock_in_the_same_repeat():
    samples = {"stock": [10.0, 20.0, 10.0], "pairs": [11.0, 22.0, 13.0]}
    assert table_of_steps(samples).splitlines()[2].split() == ["pairs", "13.0", "1.10", "(1.10-1.30)"]


def test_each_op_has_a_line_and_each_plan_a_column():
    lines = table_of_ops({"pairs": {"F.route": 2.0}, "two chunks": {"dW": 1.0}}).splitlines()
    assert [line.split() for line in lines[1:]] == [["F.route", "2.0", "0.0"], ["dW", "0.0", "1.0"]]


@pytest.mark.parametrize("name", ["one chunk", "pairs", "two chunks", "four chunks", "two tiles", "dedup, one chunk"])
def test_every_kind_of_plan_is_measured(name):
    plan = plans()[name]
    assert plan is not None
    assert not plan.overlaps_nothing
