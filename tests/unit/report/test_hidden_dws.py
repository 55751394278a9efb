"""Which part of the weight gradients counts as run during messages, on timelines written by hand."""

import json

import pytest

from megatron_lancet.files.reader import from_plain
from megatron_lancet.files.records import to_plain
from megatron_lancet.report.exposed import ExposedTable, exposed_table
from megatron_lancet.report.hidden_dws import HiddenDws, hidden_dws
from megatron_lancet.schedule.timeline import Lane, RankTimeline, Span


def rank(number, *spans):
    return RankTimeline(number, tuple(Span(*span) for span in spans), 100.0)


DISPATCH = ("L2.c0.I.dispatch", Lane.COMM, 10.0, 20.0)
COMBINE = ("L2.c1.I.combine", Lane.COMM, 15.0, 30.0)


@pytest.mark.parametrize(
    ("start_ms", "end_ms", "beside_ms"),
    [
        (0, 10, 0),  # before
        (5, 12, 2),
        (12, 14, 2),
        (12, 28, 16),  # two messages at once count once
        (5, 40, 20),
        (30, 40, 0),  # behind the wait
    ],
)
def test_hidden_dws_are_those_beside_a_message(start_ms, end_ms, beside_ms):
    found = hidden_dws([rank(0, DISPATCH, COMBINE, ("L2.W.mlp.linear_fc1", Lane.COMPUTE, start_ms, end_ms))])
    assert found == HiddenDws(end_ms - start_ms, beside_ms)


def test_hidden_dws_may_lie_beside_several_messages():
    later = ("L1.c0.I.combine", Lane.COMM, 40.0, 50.0)
    assert hidden_dws([rank(0, DISPATCH, later, ("W.output_layer", Lane.COMPUTE, 5.0, 45.0))]) == HiddenDws(40.0, 15.0)


def test_hidden_dws_may_lie_beside_any_message_with_rows():
    dw = ("L2.W.mlp.linear_fc1", Lane.COMPUTE, 0.0, 100.0)
    hops = [f"L2.c0.I.{kind}" for kind in ("dispatch", "node_dispatch", "local_dispatch", "local_combine")]
    messages = [(name, Lane.COMM, 10.0 * index, 10.0 * index + 1) for index, name in enumerate(hops)]
    assert hidden_dws([rank(0, dw, *messages)]) == HiddenDws(100.0, 4.0)


def test_hidden_dws_are_not_hidden_by_counts_reductions_or_waits():
    others = [
        ("L2.c0.F.counts", Lane.COMM, 0.0, 50.0),
        ("reduce L2", Lane.COMM, 0.0, 50.0),
        ("L2.c0.I.dispatch", Lane.WAIT, 0.0, 50.0),
    ]
    dw, op = ("L2.W.mlp.linear_fc1", Lane.COMPUTE, 0.0, 4.0), ("L2.c0.I.experts", Lane.COMPUTE, 12.0, 14.0)
    assert hidden_dws([rank(0, dw, op, DISPATCH, *others)]) == HiddenDws(4.0, 0.0)


def test_hidden_dws_are_means_over_ranks():
    inside, outside = ("W.output_layer", Lane.COMPUTE, 10.0, 16.0), ("W.output_layer", Lane.COMPUTE, 0.0, 4.0)
    assert hidden_dws([rank(0, inside, DISPATCH), rank(1, outside, DISPATCH)]) == HiddenDws(5.0, 3.0)
    assert hidden_dws([rank(0, DISPATCH)]) is None


def test_report_says_how_much_of_dws_ran_beside_messages():
    table = exposed_table([rank(0, DISPATCH, ("W.output_layer", Lane.COMPUTE, 18.0, 22.0))])
    line = "  weight gradients: 2.00 of 4.00 ms while an all-to-all was in flight, mean over ranks"
    assert line in table.as_text().splitlines()
    read = from_plain(ExposedTable, json.loads(json.dumps(to_plain(table))), "report.json")
    assert read == table
    assert "weight gradients" not in exposed_table([rank(0, DISPATCH)]).as_text()
