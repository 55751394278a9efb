"""The comparison of a profile from traces with our profiler's."""

from dataclasses import replace

import pytest

from benchmarks.from_trace.__main__ import make_job, parse_arguments
from benchmarks.from_trace.cases import CASES
from benchmarks.from_trace.summary import Pair, compare
from benchmarks.from_trace.table import as_markdown, as_text
from benchmarks.synthetic_profile import Machine, synthetic_profile
from megatron_lancet.errors import UsageError
from megatron_lancet.files.records import to_plain
from megatron_lancet.schedule.ops import OpKind, Phase

OWN = synthetic_profile(Machine())
FIELDS = ["step_ms"]


def slower(profile, factor):
    """The same profile with attention by a factor slower."""
    ops = tuple(replace(op, ms=op.ms * factor) if op.kind == OpKind.ATTENTION else op for op in profile.ops)
    return replace(profile, ops=ops)


def case_of(trace_profile):
    return {
        "name": "45",
        "title": "a case",
        "rate_bps": 1e8,
        "disturbance": {"is_disturbed": True},
        "own_profile": to_plain(OWN),
        "trace_profile": to_plain(trace_profile),
        "plans": {"k1": {}},
        "own_predictions": {"k1": {"step_ms": 110.0}},
        "trace_predictions": {"k1": {"step_ms": 95.0}},
        "sample_fields": FIELDS,
        "samples": {"stock": [[[90.0], [120.0]]] * 2, "k1": [[[90.0], [100.0]], [[100.0], [80.0]]]},
    }


def test_equal_profiles_have_no_difference_in_any_op_or_message():
    found = compare(case_of(OWN))
    assert found.whole
    assert found.chunks
    assert all(pair.difference == 0 and pair.is_equal for pair in (*found.whole, *found.chunks, *found.messages))
    assert found.total.own_ms == pytest.approx(found.total.trace_ms)
    assert found.stock_ms == 120


def test_a_slower_op_is_marked_and_weighs_as_often_as_it_runs():
    found = compare(case_of(slower(OWN, 1.5)))
    marked = {pair.name: pair for pair in found.whole if not pair.is_equal}
    assert set(marked) == {f"{phase} {OpKind.ATTENTION}" for phase in (Phase.FORWARD, Phase.INPUT_GRAD)}
    assert all(pair.difference == pytest.approx(0.5) for pair in marked.values())
    added_ms = sum(0.5 * pair.own_ms * pair.times for pair in marked.values())
    assert found.total.trace_ms - found.total.own_ms == pytest.approx(added_ms)
    assert "!" in as_text([found])


def test_predictions_are_compared_with_slower_rank_of_real_steps():
    found = compare(case_of(OWN))
    (predicted,) = found.predicted
    assert (predicted.measured_ms, predicted.own_error, predicted.trace_error) == (
        100,
        pytest.approx(0.1),
        pytest.approx(-0.05),
    )
    text = as_markdown([found])
    assert "DISTURBED" in text
    assert "| k1 | 100 (100-100) | 110 | +10.0% | 95 | -5.0% |" in text


def test_small_differences_of_short_ops_count_as_equal():
    assert Pair("", 1.0, 1.2).is_equal
    assert not Pair("", 10.0, 10.4).is_equal
    assert Pair("", 0.0, 0.1).difference == 0


def test_command_runs_case_of_45_percent_and_refuses_others(tmp_path):
    job = make_job(parse_arguments([]), [0, 1], tmp_path / "result.json")
    assert [case.name for case in job.cases] == ["45"]
    assert job.cases[0].variants == CASES["45"].variants
    with pytest.raises(UsageError, match="case"):
        make_job(parse_arguments(["--cases", "46"]), [0, 1], tmp_path / "result.json")
    with pytest.raises(UsageError, match="--repeats must be positive"):
        parse_arguments(["--repeats", "0"])
