"""The prediction benchmark's command line, cases, and the way from samples and predictions to errors."""

import dataclasses

import pytest

from benchmarks.harness.job import read_job
from benchmarks.prediction.__main__ import make_job, parse_arguments
from benchmarks.prediction.cases import CASES, CONFIGURATIONS, FIXED_PLANS, PLANNED, choose
from benchmarks.prediction.errors import compare, totals
from benchmarks.prediction.table import as_markdown, as_text
from megatron_lancet.errors import UsageError
from megatron_lancet.files.records import to_plain
from megatron_lancet.schedule.plan import fixed_plan

FIELDS = ("step_ms", "exposed_forward_ms", "exposed_backward_ms", "counts_ms")


def case_result(measured: dict[str, list[list[tuple[float, ...]]]], predicted: dict[str, tuple[float, float]]):
    """
    Args:
        measured: by configuration, per repeat and rank the values of FIELDS.
        predicted: by configuration, step and exposed time.
    """
    return {
        **dataclasses.asdict(CASES["45"]),
        "rate_bps": 2e8,
        "disturbance": {"is_disturbed": False},
        "plans": {name: to_plain(FIXED_PLANS.get(name, fixed_plan(2))) for name in predicted},
        "sample_fields": list(FIELDS),
        "predictions": {
            name: {"expected": {"step_ms": step_ms, "exposed_ms": exposed_ms}}
            for name, (step_ms, exposed_ms) in predicted.items()
        },
        "samples": measured,
    }


def repeat(step_ms: float, exposed_ms: float) -> list[tuple[float, ...]]:
    """Rank 1 takes a tenth longer and waits for 5 ms less."""
    return [(step_ms, exposed_ms - 7, 4.0, 3.0), (step_ms * 1.1, exposed_ms - 12, 4.0, 3.0)]


def test_step_is_slower_ranks_and_exposed_time_mean_of_ranks():
    repeats = [repeat(100, 50), repeat(200, 60), repeat(110, 52)]
    found = compare(case_result({"k1": repeats}, {"k1": (133.1, 42.0)}))
    (one,) = found.comparisons
    assert "measured ms (range)" in as_text([found])
    assert one.measured_ms == pytest.approx(121)
    assert one.error == pytest.approx(0.1)
    assert one.measured_exposed_ms == pytest.approx(52 - 2.5)
    assert one.exposed_error_ms == pytest.approx(-7.5)


@pytest.mark.parametrize(
    ("measured_ms", "predicted_ms", "is_close"),
    [(20, 27, True), (20, 28, False), (200, 227, True), (200, 228, False), (200, 167, False)],
)
def test_exposed_time_is_close_within_ten_ms_or_fifteen_per_cent(measured_ms, predicted_ms, is_close):
    case = compare(case_result({"k1": [repeat(1000, measured_ms)]}, {"k1": (1100.0, predicted_ms)}))
    assert case.comparisons[0].exposed_is_close is is_close


def test_first_half_of_repeats_is_compared_with_second():
    """What the machine's own unrest makes of a perfect prediction."""
    repeats = [repeat(step_ms, 100) for step_ms in (100, 100, 100, 125, 125, 125)]
    case = compare(case_result({"k1": repeats, "k1-dw": repeats[:1]}, {"k1": (110, 97.5), "k1-dw": (110, 97.5)}))
    (one,) = case.halves
    assert (one.name, one.measured_ms, one.predicted_ms) == ("k1", pytest.approx(137.5), pytest.approx(110))
    assert one.exposed_is_close
    assert "the first half of the repeats as a prediction of the second: 20.0%, 20.0%, 1 of 1" in as_text([case])


def test_totals_take_errors_by_their_size():
    measured = {name: [repeat(100, 50)] for name in ("k1", "k1-dw", "stack-k2")}
    predicted = {"k1": (110 * 0.8, 50.0), "k1-dw": (110 * 1.1, 50.0), "stack-k2": (110 * 1.02, 500.0)}
    case = compare(case_result(measured, predicted))
    total = totals(case.comparisons)
    assert total.median == pytest.approx(0.1)
    assert total.worst == pytest.approx(0.2)
    assert total.worst_name == "45 k1"
    assert (total.num_exposed_close, total.number) == (2, 3)


def test_errors_of_plans_with_pairing_are_summed_up_apart():
    measured = {name: [repeat(100, 50)] for name in ("k1", "paired-k1", "paired-k2")}
    predicted = {"k1": (220.0, 50.0), "paired-k1": (110 * 1.02, 50.0), "paired-k2": (110 * 0.94, 50.0)}
    case = compare(case_result(measured, predicted))
    assert [one.name for one in case.paired] == ["paired-k1", "paired-k2"]
    assert "The 2 with pairing: median 4.0%, worst 6.0% in 45 paired-k2" in as_text([case])
    unpaired = compare(case_result({"k1": measured["k1"]}, {"k1": predicted["k1"]}))
    assert "with pairing" not in as_text([unpaired])


@pytest.mark.parametrize(("planned_ms", "fastest", "slower"), [(103, "stack-k2", 0.03), (98, PLANNED, 0.0)])
def test_planners_choice_is_compared_with_fastest_configuration(planned_ms, fastest, slower):
    measured = {"k1": [repeat(150, 50)], "stack-k2": [repeat(100, 50)], PLANNED: [repeat(planned_ms, 50)]}
    case = compare(case_result(measured, dict.fromkeys(measured, (100.0, 50.0))))
    assert case.fastest == fastest
    assert case.planned_over_fastest == pytest.approx(1 + slower)
    assert f"takes {slower:.1%} longer than the fastest, {fastest} (wanted: at most 2%)" in as_text([case])


def test_tables_have_every_configuration_and_disturbances():
    result = case_result({"k1": [repeat(100, 50)]}, {"k1": (121.0, 10.0)})
    result["disturbance"] = {"is_disturbed": True}
    case = compare(result)
    for text in (as_text([case]), as_markdown([case])):
        assert "DISTURBED: other work took the processor or memory" in text
        assert "+10.0%" in text
        assert "-37.5 !" in text


@pytest.mark.parametrize(
    ("case", "configuration", "message"),
    [
        ("20", "dedup-k1", r"dedup-k1 .* in case 20 a token has one expert .* Pass --cases 45-top4\."),
        ("45-top4", "two-hop-k1", r"two-hop-k1 .* in case 45-top4 a node has one rank.* Pass --cases 65-nodes"),
        ("20", "paired-k1", r"a step of case 20 has one micro-batch\. Pass --cases 45-m4"),
        ("21", None, "there is no"),
        ("20", "k3", "there is no"),
    ],
)
def test_impossible_cases_are_refused(case, configuration, message):
    with pytest.raises(UsageError, match=message):
        choose([case], None if configuration is None else [configuration])


@pytest.mark.parametrize(("planned", "dispatch"), [("stack-k2", "plain"), ("two-hop-k2", "two-hop")])
def test_table_says_which_dispatch_was_planned(planned, dispatch):
    measured = {"k1": [repeat(150, 50)], PLANNED: [repeat(100, 50)]}
    result = case_result(measured, dict.fromkeys(measured, (100.0, 50.0)))
    result["plans"][PLANNED] = to_plain(FIXED_PLANS[planned])
    result["rate_bps"] = None
    text = as_text([compare(result)])
    assert f"The planner's choice ({dispatch}) takes 0.0% longer than the fastest, planned" in text
    assert ": no cap, k1 exposes" in text


def test_orders_are_ours():
    (case,) = choose(["20"], [PLANNED, "k1"])
    assert case.variants == ("k1", PLANNED)


def test_a_job_survives_its_file(tmp_path):
    args = parse_arguments(["--cases", "skewed", "--layers", "2", "--rate", "100", "--timelines", str(tmp_path)])
    job = make_job(args, [0, 1], tmp_path / "result.json")
    assert job.cases[0].shape.layers == 2
    assert job.cases[0].shape.hot_share == 0.4
    job.write(tmp_path / "job.json")
    assert read_job(tmp_path / "job.json") == job
    assert set(job.cases[0].variants) <= set(CONFIGURATIONS)


@pytest.mark.parametrize("argv", [["--repeats", "0"], ["--rate", "-1"], ["--timelines", "/nowhere"]])
def test_arguments_out_of_range_are_refused(argv):
    with pytest.raises(UsageError, match=argv[0]):
        parse_arguments(argv)
