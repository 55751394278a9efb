"""Every way through warm-up, baseline, profile, verify and watch, as a script of figures."""

from dataclasses import replace

import pytest

from megatron_lancet.planning.estimate import StepEstimate
from megatron_lancet.schedule.plan import Segment, fixed_plan
from megatron_lancet.training.tuning.controller import (
    MIN_STEPS_BETWEEN_PLANS,
    NUM_DRIFT_WINDOWS,
    NUM_SETTLE_STEPS,
    NUM_WARM_UP_STEPS,
    Decision,
    Stage,
    Tuning,
    plan_without_overlap,
)
from megatron_lancet.training.tuning.step_stats import Figures

NUM = 4
PLAN, OTHER = fixed_plan(2), fixed_plan(4)
BASE = plan_without_overlap()


def figures(step_ms: float, exposed_ms: float = 50.0) -> Figures:
    return Figures(step_ms, 0.0, exposed_ms, 0.0, 100.0, NUM)


def run(tuning: Tuning, taken: Figures, num_unmeasured: int = 0) -> Decision:
    """Steps up to the next decision: exactly as many as announced."""
    assert [tuning.step_done() for _ in range(num_unmeasured + NUM)] == [False] * (num_unmeasured + NUM - 1) + [True]
    return tuning.decide(taken)


def profiling(baseline_ms: float = 200.0) -> Tuning:
    tuning = Tuning(NUM)
    decision = run(tuning, figures(baseline_ms), NUM_WARM_UP_STEPS)
    assert decision.make_plan
    assert decision.plan is None
    assert tuning.stage is Stage.PROFILE
    return tuning


def verifying(predicted_ms: float = 150.0, **kwargs) -> Tuning:
    tuning = profiling()
    assert tuning.planned(PLAN, StepEstimate(predicted_ms, 10.0), **kwargs).plan == PLAN
    assert tuning.stage is Stage.VERIFY
    return tuning


def watching(exposed_ms: float = 10.0) -> Tuning:
    tuning = verifying()
    run(tuning, figures(150, exposed_ms), NUM_SETTLE_STEPS)
    assert (tuning.stage, tuning.plan, tuning.settled) == (Stage.WATCH, PLAN, True)
    return tuning


def test_a_plan_that_pays_stays():
    tuning = Tuning(NUM)
    assert (tuning.stage, tuning.plan) == (Stage.WARM_UP, BASE)
    run(tuning, figures(200), NUM_WARM_UP_STEPS)
    tuning.planned(PLAN, StepEstimate(148, 10), why="best of 12")
    assert not tuning.settled
    decision = run(tuning, figures(150, 8), NUM_SETTLE_STEPS)
    assert decision == Decision(
        lines=(
            "measured 150.0 ms a step, 8.0 ms of it exposed: 1.33x as fast as before (200.0 ms); "
            "predicted 148.0 ms, -1.3 %",
        )
    )
    assert tuning.settled
    assert tuning.lines == [
        "without overlap: 200.0 ms a step, 50.0 ms of it exposed",
        f"{PLAN}: predicted 148.0 ms a step, measured before 200.0 ms (best of 12)",
        decision.lines[0],
    ]
    assert tuning.num_steps_to_plan(7) == NUM_WARM_UP_STEPS + NUM + 7 + NUM_SETTLE_STEPS + NUM


def test_without_overlap_is_stock():
    assert (BASE.num_chunks, BASE.dw_policy, BASE.dw_window) == (1, "none", 0)


def test_a_slower_plan_is_left():
    tuning = verifying()
    decision = run(tuning, figures(203), NUM_SETTLE_STEPS)
    assert decision.plan == tuning.plan == BASE
    assert decision.lines[0].startswith(
        "measured 203.0 ms a step, 50.0 ms of it exposed: slower than the 200.0 ms before by more than the noise of 2.0"
    )
    assert decision.lines[0].endswith("predicted 150.0 ms, -26.1 %, which is far off")
    assert decision.lines[1].startswith(f"going back to {BASE}: 200.0 ms a step; measuring that again")
    assert not tuning.settled
    decision = run(tuning, figures(201), NUM_SETTLE_STEPS)
    assert decision.plan is None
    assert decision.lines == (f"measured 201.0 ms a step, 50.0 ms of it exposed under {BASE}: it stays",)
    assert (tuning.stage, tuning.plan, tuning.settled) == (Stage.WATCH, BASE, True)
    assert tuning.remark == "slower than before, so it went back"
    assert tuning.chosen == figures(201)
    assert tuning.prediction is None


def test_a_plan_that_only_looked_slow_is_taken_after_all():
    """The machine slowed down between the two: measured again, what ran before is slower than the plan was."""
    tuning = verifying()
    assert run(tuning, figures(230, 20), NUM_SETTLE_STEPS).plan == BASE
    decision = run(tuning, figures(240), NUM_SETTLE_STEPS)
    assert decision.plan == tuning.plan == PLAN
    assert f"the machine had become slower; taking {PLAN} after all: 230.0 ms a step" in decision.lines[0]
    assert (tuning.stage, tuning.settled, tuning.chosen) == (Stage.WATCH, True, figures(230, 20))
    assert (tuning.prediction, tuning.remark) == (StepEstimate(150.0, 10.0), "")


def test_of_two_that_looked_slow_the_faster_is_taken_after_all():
    tuning = verifying(profiled={"four": (OTHER, 150.0)})
    assert run(tuning, figures(230), NUM_SETTLE_STEPS).plan == OTHER
    assert run(tuning, figures(220), NUM_SETTLE_STEPS).plan == BASE
    assert run(tuning, figures(225), NUM_SETTLE_STEPS).plan == OTHER
    assert (tuning.prediction, tuning.remark) == (None, "a plan that ran for the profile was faster")


def test_slower_within_the_noise_is_kept():
    tuning = verifying()
    decision = run(tuning, figures(201.5), NUM_SETTLE_STEPS)
    assert decision.plan is None
    assert "as fast as before (200.0 ms) within the noise of 2.0 ms" in decision.lines[0]
    assert tuning.plan == PLAN


@pytest.mark.parametrize(("other_ms", "kept"), [(170, OTHER), (230, BASE)])
def test_a_faster_profiled_plan_is_tried_after_a_slow_one(other_ms, kept):
    tuning = verifying(profiled={"four chunks": (OTHER, 180.0), "none": (BASE, 170.0), "two": (PLAN, 100.0)})
    decision = run(tuning, figures(220), NUM_SETTLE_STEPS)
    assert decision.plan == OTHER
    assert decision.lines[1] == "trying four chunks, which took 180.0 ms a step while profiling"
    decision = run(tuning, figures(other_ms), NUM_SETTLE_STEPS)
    assert decision.plan == (None if kept == OTHER else BASE)
    assert "predicted" not in decision.lines[0]
    if kept == BASE:
        run(tuning, figures(200), NUM_SETTLE_STEPS)
    assert tuning.plan == kept
    assert tuning.remark == (
        "a plan that ran for the profile was faster" if kept == OTHER else "slower than before, so it went back"
    )


def test_the_better_of_two_that_pay_is_kept():
    tuning = verifying(profiled={"four": (OTHER, 100.0)})
    assert run(tuning, figures(150, 9), NUM_SETTLE_STEPS).plan == OTHER
    decision = run(tuning, figures(190), NUM_SETTLE_STEPS)
    assert decision.plan == tuning.plan == PLAN
    assert (tuning.chosen, tuning.prediction) == (figures(150, 9), StepEstimate(150.0, 10.0))


def test_a_profiled_plan_that_is_not_clearly_faster_is_not_tried():
    tuning = verifying(profiled={"four": (OTHER, 149.0)})
    assert run(tuning, figures(150), NUM_SETTLE_STEPS).plan is None
    assert tuning.stage is Stage.WATCH


def test_no_overlap_is_a_legal_answer():
    tuning = profiling()
    in_two_stages = replace(BASE, segments=(Segment(1, 2, 1), Segment(3, None, 1)))
    decision = tuning.planned(in_two_stages, StepEstimate(200, 50))
    assert (tuning.stage, decision.plan) == (Stage.WATCH, BASE)
    assert "nothing else is expected to be faster" in decision.lines[0]
    assert tuning.chosen == tuning.baseline


@pytest.mark.parametrize(("other_ms", "kept"), [(150, OTHER), (199, OTHER), (201, BASE)])
def test_a_profiled_plan_is_tried_although_none_is_expected_to_pay(other_ms, kept):
    tuning = profiling()
    assert tuning.planned(BASE, StepEstimate(200, 50), {"four": (OTHER, 160.0)}).plan == OTHER
    decision = run(tuning, figures(other_ms), NUM_SETTLE_STEPS)
    assert decision.plan == (None if kept == OTHER else BASE)
    assert (tuning.plan, tuning.stage) == (kept, Stage.WATCH)


def test_a_run_too_short_to_tune_is_not_judged():
    tuning = Tuning(NUM)
    assert tuning.give_up(PLAN, "too short") == Decision(PLAN, lines=("too short",))
    assert (tuning.stage, tuning.settled, tuning.chosen) == (Stage.FIXED, True, None)


def test_without_a_plan_all_stays_as_it_was():
    tuning = profiling()
    decision = tuning.planning_failed("no plan fits")
    assert (tuning.stage, tuning.plan, decision.plan) == (Stage.WATCH, BASE, BASE)
    assert decision.lines == (f"no plan fits; the plan stays {BASE}",)


def test_a_plan_that_is_taken_over_is_measured_and_not_judged():
    tuning = Tuning(NUM)
    assert tuning.take_over(PLAN, None, None, "from the checkpoint").plan == PLAN
    assert tuning.settled
    decision = run(tuning, figures(1e6), NUM_WARM_UP_STEPS)
    assert (decision.plan, tuning.plan, tuning.stage) == (None, PLAN, Stage.WATCH)
    assert tuning.baseline is None


@pytest.mark.parametrize("exposed_ms", [1.0, 40.0])
def test_exposed_time_that_stays_elsewhere_asks_for_a_plan(exposed_ms):
    tuning = watching(exposed_ms=20.0)
    for _ in range(MIN_STEPS_BETWEEN_PLANS // NUM):
        assert run(tuning, figures(150, 20)) == Decision()
    for _ in range(NUM_DRIFT_WINDOWS - 1):
        assert run(tuning, figures(170, exposed_ms)) == Decision()
    decision = run(tuning, figures(170, exposed_ms))
    assert decision.make_plan
    assert decision.lines == (
        f"exposed time is {exposed_ms} ms a step for {NUM_DRIFT_WINDOWS * NUM} steps, 20.0 ms when the plan was "
        "chosen: planning anew",
    )
    # The new plan is judged by what the old one takes now, and the way back is to the old one.
    assert tuning.planned(OTHER, StepEstimate(140, 5)).plan == OTHER
    assert run(tuning, figures(180, 5), NUM_SETTLE_STEPS).plan == PLAN
    assert (tuning.chosen, tuning.num_plans) == (figures(170, exposed_ms), 2)


def test_exposed_time_that_comes_back_is_no_drift():
    tuning = watching(exposed_ms=20.0)
    for _ in range(2 * MIN_STEPS_BETWEEN_PLANS // NUM):
        for exposed_ms in [40.0] * (NUM_DRIFT_WINDOWS - 1) + [20.0]:
            assert run(tuning, figures(150, exposed_ms)) == Decision()


def test_plans_are_not_made_all_the_time():
    tuning = watching(exposed_ms=20.0)
    num_steps = NUM_SETTLE_STEPS + NUM  # since the plan was made
    while not run(tuning, figures(170, 60)).make_plan:
        num_steps += NUM
    assert MIN_STEPS_BETWEEN_PLANS <= num_steps + NUM < MIN_STEPS_BETWEEN_PLANS + NUM
    tuning.planned(PLAN, StepEstimate(165, 60))
    assert run(tuning, figures(170, 60), NUM_SETTLE_STEPS) == Decision(), "what is usual now is what it showed last"
    assert tuning.stage is Stage.WATCH
