"""From the samples of whole trainings to ratios and times; which variants run in a case, and with which flags."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.auto import quoted
from benchmarks.auto.cases import AUTO, CASES, KEPT, MEGATRON, SAME, USERS, VARIANTS, chosen
from benchmarks.auto.summary import TRAINING_STEPS, as_markdown, as_text, summarise
from benchmarks.auto.training import Running, _check_losses, catch_up
from benchmarks.demo.links.link import FREE_BPS
from benchmarks.demo.steps import RankStep, Step
from benchmarks.quoted.results import Quoted
from megatron_lancet.errors import UsageError
from megatron_lancet.features.dedup.order import DEDUP
from megatron_lancet.planning.plan_file import read_plan_file
from megatron_lancet.schedule.plan import ChunkDim, fixed_plan, paired


def record(step_ms, waited_ms=0.0, tuning_ms=(), plan="stock", losses=(2.0, 1.0)):
    """A variant with two turns of two steps."""
    samples = [[[step_ms, waited_ms, 0.0, 1.0], [step_ms, waited_ms, 0.0, 1.0]]] * 2
    return {"plan": plan, "tuning_ms": list(tuning_ms), "losses": list(losses), "samples": samples, "lines": []}


def case(**variants):
    return {"name": "45-m4", "share": 0.45, "rate_bps": 1e8, "micro_batches": 4, "variants": variants}


MEASURED = case(
    **{
        SAME: record(1000.0, 450.0),
        USERS: record(1100.0, 500.0),
        AUTO: record(612.0, tuning_ms=[900.0] * 50, plan="chunks=2", losses=(2.0, 1.001)),
        "k2": record(700.0),
        "pairs": record(600.0, plan="pairs"),
        MEGATRON: record(500.0),
    }
)


AUTO_STEPS = record(612.0, tuning_ms=[900.0] * 50)


def test_ratios_are_to_stock_and_the_best_fixed_plan():
    found = summarise(MEASURED)
    assert found.variants[AUTO].speedup.median == pytest.approx(1000 / 612)
    assert found.variants[SAME].waited_share == pytest.approx(0.45)
    assert (found.best, found.to_best.median) == ("pairs", pytest.approx(1.02))
    assert found.max_loss_difference == pytest.approx(0.001)


def test_error_of_a_ratio_is_that_of_its_turns():
    """Steps of a turn are alike; with each turn the machine's speed changes."""

    def turns(*step_ms):
        return [[[one, 0.0, 0.0, 1.0]] * 2 for one in step_ms]

    slower = 600.0 * math.exp(0.2)
    auto, best = (
        record(600.0, tuning_ms=[900.0]) | {"samples": turns(*steps)} for steps in ([600.0, slower, 600.0], [600.0] * 3)
    )
    measured = MEASURED | {"variants": {SAME: best, AUTO: auto, "pairs": best}}
    assert summarise(measured).to_best_error == pytest.approx(0.2 / math.sqrt(3) / math.sqrt(3))
    one_turn = {name: one | {"samples": one["samples"][:1]} for name, one in measured["variants"].items()}
    assert summarise(measured | {"variants": one_turn}).to_best_error is None


def test_tuning_counts_in_the_time_to_a_step():
    found = summarise(MEASURED)
    auto_ms = 50 * 900.0 + (TRAINING_STEPS - 50) * 612.0
    assert found.num_tuning_steps == 50
    assert found.time_to_step == pytest.approx(TRAINING_STEPS * 600.0 / auto_ms)
    assert not found.counts_planning


def test_work_between_the_steps_of_a_tuning_counts():
    step = RankStep(1, 2.0, 500.0, 0.0, 0.0, 0, 1, whole_ms=5500.0)
    auto = Running(VARIANTS[AUTO], SimpleNamespace(log=Path("/dev/null")))
    auto.steps = [Step([step, replace(step, whole_ms=5400.0)])]
    auto.tuning, auto.measured = auto.steps, [auto.steps * 2] * 2
    found = summarise(MEASURED | {"variants": MEASURED["variants"] | {AUTO: auto.record()}})
    assert found.counts_planning
    assert found.time_to_step == pytest.approx(TRAINING_STEPS * 500.0 / (5500.0 + (TRAINING_STEPS - 1) * 500.0))


def test_stock_as_a_user_has_it_is_compared_step_by_step():
    """The ratio of the medians would be 2000 over 1250."""
    slow = {"samples": [[[1000.0, 0.0, 0.0, 1.0]] * 2, [[3000.0, 0.0, 0.0, 1.0]] * 2]}
    fast = {"samples": [[[500.0, 0.0, 0.0, 1.0]] * 2, [[2000.0, 0.0, 0.0, 1.0]] * 2]}
    found = summarise(
        MEASURED | {"variants": MEASURED["variants"] | {USERS: record(1.0) | slow, AUTO: AUTO_STEPS | fast}}
    )
    assert found.against_users is not None
    assert found.against_users.median == pytest.approx((1000 / 500 + 3000 / 2000) / 2)


def test_disturbed_case_says_so_in_its_own_tables():
    disturbed = summarise(MEASURED | {"disturbance": {"is_disturbed": True}})
    assert "DISTURBED" in as_text([disturbed])
    assert "DISTURBED" in as_markdown([disturbed])
    assert "DISTURBED" not in as_text([summarise(MEASURED | {"disturbance": {"is_disturbed": False}})])


def running(name, *losses):
    one = Running(VARIANTS[name], SimpleNamespace())
    one.steps = [Step([RankStep(1, value, 1.0, 0.0, 0.0, 0, 1)]) for value in losses]
    return one


@pytest.mark.parametrize("loss", [math.nan, 1.1])
def test_a_loss_that_differs_ends_the_benchmark(loss):
    reference = running(SAME, 2.0, 1.0)
    _check_losses({SAME: reference, AUTO: running(AUTO, 2.0, 1.001)})
    with pytest.raises(UsageError, match=r"a loss of pairs differs from off-same's by .* can't be compared"):
        _check_losses({SAME: reference, "pairs": running("pairs", 2.0, loss)})
    with pytest.raises(UsageError, match="auto has 3 losses, and off-same has 2 to compare with"):
        _check_losses({SAME: reference, AUTO: running(AUTO, 2.0, 1.001, loss)})


def test_reference_runs_as_many_steps_as_auto_on_a_free_link():
    reference, auto, done = running(SAME, 2.0), running(AUTO, *[2.0] * 4), []
    reference.job.run = lambda steps, on_step: [on_step(number, auto.steps[0].ranks) for number in steps]
    link = SimpleNamespace(set_rate=lambda rate_bps: done.append((rate_bps, len(reference.steps))))
    catch_up(reference, [running("pairs", 2.0), auto], 1e8, link)
    catch_up(reference, [auto], 1e8, link)
    assert done == [(FREE_BPS, 1), (1e8, 4)]
    _check_losses({SAME: reference, AUTO: auto})


def test_tuning_is_counted_in_steps_of_the_best_plan_beside_it():
    slow_machine = record(600.0) | {"beside_ms": [[1200.0, 1200.0], [1200.0, 1200.0], [600.0, 600.0]]}
    auto = record(612.0, tuning_ms=[1800.0] * 30 + [900.0] * 20)
    found = summarise(
        MEASURED | {"segment_steps": 30, "variants": {SAME: record(1e3), AUTO: auto, "pairs": slow_machine}}
    )
    in_steps = 30 * 1800 / 1200 + 20 * 900 / 900 + (TRAINING_STEPS - 50) * 1.02
    assert found.time_to_step == pytest.approx(TRAINING_STEPS / in_steps)


def test_tables_have_every_variant_with_its_plan():
    for text in (as_text([summarise(MEASURED)]), as_markdown([summarise(MEASURED)])):
        assert all(f"{name}: {VARIANTS[name].meaning}" in text for name in MEASURED["variants"])
        assert "1.63 (1.63-1.63)" in text
        assert "its step is 1.020" in text


def test_predictions_are_compared_with_steps_of_the_race():
    prefix, paired = "Megatron-Lancet plan", "chunks=1 dw=fill paired (at the ends chunks=2 dw=none)"
    lines = [
        f"{prefix}: measuring 4 plans in turns: no overlap; chunks=2, predicted 1900.0 ms a step; {paired}, predicted "
        "2100.0 ms a step; chunks=4, predicted 2000.0 ms a step; chunks=8 (best of 42)",
        f"{prefix}: out after 1 turn: no overlap (3000.0 ms), {paired} (2000.0 ms), chunks=8 (2100.0 ms); chunks=2 "
        "takes 1950.0 ms",
        f"{prefix}: out after 2 turns: chunks=4 (2500.0 ms); chunks=2 takes 1950.0 ms",
        f"{prefix}: two chunks (chunks=2): measured 2000.0 ms a step, 1.62x as fast as no overlap; predicted 1900.0 ms",
    ]
    assert summarise(MEASURED).prediction_error is None
    found = summarise(case(**MEASURED["variants"] | {AUTO: MEASURED["variants"][AUTO] | {"lines": lines}}))
    assert found.prediction_errors == pytest.approx({paired: 0.05, "chunks=4": -0.2, "chunks=2": -0.05})
    assert found.prediction_error == pytest.approx(-0.05)


def test_documents_have_every_case_and_the_errors_of_predictions(monkeypatch):
    measured = Quoted("auto-10-m1-2026-11-30.json", "2026-11-30", MEASURED | {"disturbance": {"is_disturbed": False}})
    monkeypatch.setattr(quoted, "newest", lambda name: {"45-m4": measured})
    monkeypatch.setattr(quoted, "all_runs", lambda name: [measured])
    assert "(`45-m4`) | 45% | 1.63 (1.63-1.63) | 1.80 | 2.00 (2.00-2.00) (`auto` 1.63 beside it, " in quoted.headline()
    assert "in 1 cases" in quoted.sentence()
    assert "No plan had a predicted and a measured step" in quoted.auto()
    assert "two processes" not in quoted.auto()
    same = measured.case["variants"] | {"pairs": record(600.0, plan="chunks=2"), "k2": record(590.0)}
    same[AUTO] |= {"plan": "chunks=2 attention=fused"}
    measured = replace(measured, case=measured.case | {"variants": same})
    assert "In 1 cases a fixed plan is the plan of `auto`: two processes with one plan differ by 2.0 %" in quoted.auto()


def test_only_stock_as_a_user_has_it_keeps_its_messages():
    assert [name for name, one in VARIANTS.items() if "--own-messages" in one.options] == [USERS]


@pytest.mark.parametrize("name", CASES)
def test_variants_of_a_case_fit_it(name):
    found = CASES[name]
    names = [variant.name for variant in found.variants]
    assert names[0] == SAME
    assert {USERS, AUTO} < set(names)
    assert len(set(names)) == len(names)
    assert any("pairs" in one for one in names) == (found.micro_batches > 1)
    assert any("dedup" in one for one in names) == (found.topk > 1)
    assert (MEGATRON in names) == (found.te and found.micro_batches > 1)


@pytest.mark.parametrize("name", CASES)
def test_fixed_plans_run_the_references_attention(name):
    found = CASES[name]
    for variant in found.variants:
        kernel = [*found.flags_of(variant)].count("--lancet-attention")
        assert kernel == (variant.name not in (USERS, AUTO, KEPT) and not found.te)


def test_plan_file_of_cut_ends_is_up_to_date():
    _, file = VARIANTS["pairs-ends-k2-seq-dedup"].flags
    ends = fixed_plan(2, chunk_dim=ChunkDim.SEQUENCE, dispatch=DEDUP)
    assert read_plan_file(Path(file)).plan == paired(fixed_plan(1, dispatch=DEDUP), ends)


def test_unknown_cases_are_refused():
    with pytest.raises(UsageError, match=r"unknown case 46-m4\. Expected: 45-m4, "):
        chosen(["46-m4"])
    assert chosen([]) == list(CASES.values())
