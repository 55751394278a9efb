"""Every way through warm-up, baseline, profile, verify and watch, as a script of figures."""

from dataclasses import replace

import pytest

from megatron_lancet.planning.estimate import StepEstimate
from megatron_lancet.schedule.plan import Dispatch, Plan, Segment, fixed_plan, paired
from megatron_lancet.training.tuning.controller import (
    MIN_STEPS_BETWEEN_PLANS,
    NUM_DRIFT_WINDOWS,
    NUM_SETTLE_STEPS,
    NUM_TUNING_WARM_UP_STEPS,
    Planned,
    TuningController,
    TuningState,
    plan_without_overlap,
)
from megatron_lancet.training.tuning.step_stats import StepStats

NUM = 4
PLAN, OTHER = fixed_plan(2), fixed_plan(4)
BASE = plan_without_overlap()


def stats(step_ms: float, exposed_ms: float = 50.0) -> StepStats:
    return StepStats(step_ms, 0.0, exposed_ms, 0.0, 100.0, NUM)


def run(tuning: TuningController, taken: StepStats, num_unmeasured: int = 0) -> Plan | None:
    """Steps up to the next decision: exactly as many as announced."""
    assert [tuning.step_done() for _ in range(num_unmeasured + NUM)] == [False] * (num_unmeasured + NUM - 1) + [True]
    return tuning.decide(taken)


def profiling(baseline_ms: float = 200.0) -> TuningController:
    tuning = TuningController(NUM)
    plan = run(tuning, stats(baseline_ms), NUM_TUNING_WARM_UP_STEPS)
    assert plan is None
    assert tuning.state is TuningState.PROFILE
    return tuning


def verifying(predicted_ms: float = 150.0, **kwargs) -> TuningController:
    tuning = profiling()
    assert tuning.planned(Planned(PLAN, StepEstimate(predicted_ms, 10.0), **kwargs)) == PLAN
    assert tuning.state is TuningState.VERIFY
    return tuning


def watching(exposed_ms: float = 10.0) -> TuningController:
    tuning = verifying()
    run(tuning, stats(150, exposed_ms), NUM_SETTLE_STEPS)
    assert (tuning.state, tuning.plan, tuning.settled) == (TuningState.WATCH, PLAN, True)
    return tuning


def test_faster_plan_is_kept():
    tuning = TuningController(NUM)
    assert (tuning.state, tuning.plan) == (TuningState.WARM_UP, BASE)
    run(tuning, stats(200), NUM_TUNING_WARM_UP_STEPS)
    tuning.planned(Planned(PLAN, StepEstimate(148, 10), "best of 12"))
    assert not tuning.settled
    plan = run(tuning, stats(150, 8), NUM_SETTLE_STEPS)
    assert plan is None
    assert tuning.settled
    assert tuning.lines == [
        "without overlap: 200.0 ms a step, 50.0 ms of it exposed",
        f"{PLAN}: predicted 148.0 ms a step, measured before 200.0 ms (best of 12)",
        "measured 150.0 ms a step, 8.0 ms of it exposed: 1.33x as fast as before (200.0 ms); "
        "predicted 148.0 ms, -1.3 %",
    ]
    assert tuning.num_steps_to_plan(7) == NUM_TUNING_WARM_UP_STEPS + NUM + 7 + NUM_SETTLE_STEPS + NUM


def test_plan_without_overlap_is_stock():
    assert (BASE.num_chunks, BASE.dw_policy, BASE.dw_window) == (1, "none", 0)


def test_slower_plan_is_dropped():
    tuning = verifying()
    plan = run(tuning, stats(203), NUM_SETTLE_STEPS)
    assert plan == tuning.plan == BASE
    assert tuning.lines[-2].startswith(
        "measured 203.0 ms a step, 50.0 ms of it exposed: slower than the 200.0 ms before by more than the noise of 2.0"
    )
    assert tuning.lines[-2].endswith("predicted 150.0 ms, -26.1 %, which is far off")
    assert tuning.lines[-1].startswith(f"going back to {BASE}: 200.0 ms a step; measuring that again")
    assert not tuning.settled
    plan = run(tuning, stats(201), NUM_SETTLE_STEPS)
    assert plan is None
    assert tuning.lines[-1] == f"measured 201.0 ms a step, 50.0 ms of it exposed under {BASE}: it stays"
    assert (tuning.state, tuning.plan, tuning.settled) == (TuningState.WATCH, BASE, True)
    assert tuning.remark == "slower than before, so it went back"
    assert tuning.chosen == stats(201)
    assert tuning.prediction is None


def test_plan_that_looked_slow_is_taken_after_remeasuring():
    """The machine slowed down between the two: measured again, what ran before is slower than the plan was."""
    tuning = verifying()
    assert run(tuning, stats(230, 20), NUM_SETTLE_STEPS) == BASE
    plan = run(tuning, stats(240), NUM_SETTLE_STEPS)
    assert plan == tuning.plan == PLAN
    assert f"the machine had become slower; taking {PLAN} after all: 230.0 ms a step" in tuning.lines[-1]
    assert (tuning.state, tuning.settled, tuning.chosen) == (TuningState.WATCH, True, stats(230, 20))
    assert (tuning.prediction, tuning.remark) == (StepEstimate(150.0, 10.0), "")


def test_faster_of_two_slow_plans_is_taken_after_remeasuring():
    tuning = verifying(profiled={"four": (OTHER, 150.0)})
    assert run(tuning, stats(230), NUM_SETTLE_STEPS) == OTHER
    assert run(tuning, stats(220), NUM_SETTLE_STEPS) == BASE
    assert run(tuning, stats(225), NUM_SETTLE_STEPS) == OTHER
    assert (tuning.prediction, tuning.remark) == (None, "a plan that ran for the profile was faster")


def test_plan_slower_within_the_noise_is_kept():
    tuning = verifying()
    plan = run(tuning, stats(201.5), NUM_SETTLE_STEPS)
    assert plan is None
    assert "as fast as before (200.0 ms) within the noise of 2.0 ms" in tuning.lines[-1]
    assert tuning.plan == PLAN


@pytest.mark.parametrize(("other_ms", "kept"), [(170, OTHER), (230, BASE)])
def test_profiled_plan_is_tried_after_a_slow_plan(other_ms, kept):
    tuning = verifying(profiled={"four chunks": (OTHER, 180.0), "none": (BASE, 170.0), "two": (PLAN, 100.0)})
    plan = run(tuning, stats(220), NUM_SETTLE_STEPS)
    assert plan == OTHER
    assert tuning.lines[-1] == "trying four chunks, which took 180.0 ms a step while profiling"
    plan = run(tuning, stats(other_ms), NUM_SETTLE_STEPS)
    assert plan == (None if kept == OTHER else BASE)
    assert "predicted" not in next(line for line in reversed(tuning.lines) if line.startswith("measured"))
    if kept == BASE:
        run(tuning, stats(200), NUM_SETTLE_STEPS)
    assert tuning.plan == kept
    assert tuning.remark == (
        "a plan that ran for the profile was faster" if kept == OTHER else "slower than before, so it went back"
    )


def test_better_of_two_faster_plans_is_kept():
    tuning = verifying(profiled={"four": (OTHER, 100.0)})
    assert run(tuning, stats(150, 9), NUM_SETTLE_STEPS) == OTHER
    plan = run(tuning, stats(190), NUM_SETTLE_STEPS)
    assert plan == tuning.plan == PLAN
    assert (tuning.chosen, tuning.prediction) == (stats(150, 9), StepEstimate(150.0, 10.0))


def test_profiled_plan_that_is_not_clearly_faster_is_not_tried():
    tuning = verifying(profiled={"four": (OTHER, 149.0)})
    assert run(tuning, stats(150), NUM_SETTLE_STEPS) is None
    assert tuning.state is TuningState.WATCH


def test_plan_that_only_pairs_is_no_plan_without_overlap():
    only_paired = paired(plan_without_overlap())
    tuning = profiling()
    assert tuning.planned(Planned(only_paired, StepEstimate(150.0, 10.0))) == only_paired
    assert run(tuning, stats(150), NUM_SETTLE_STEPS) is None
    assert (tuning.state, tuning.plan, tuning.settled) == (TuningState.WATCH, only_paired, True)
    # A drift measures links under another plan, and comes back if nothing better is found.
    for _ in range(MIN_STEPS_BETWEEN_PLANS // NUM + NUM_DRIFT_WINDOWS):
        if tuning.state is TuningState.WATCH:
            run(tuning, stats(250, 120))
    assert tuning.state is TuningState.PROFILE
    assert tuning.planning_failed("no costs") == only_paired


def test_paired_plan_that_does_not_pay_goes_back():
    tuning = profiling()
    plan = paired(PLAN, OTHER)
    assert tuning.planned(Planned(plan, StepEstimate(150.0, 10.0))) == plan
    assert run(tuning, stats(230), NUM_SETTLE_STEPS) == BASE
    run(tuning, stats(200), NUM_SETTLE_STEPS)
    assert (tuning.state, tuning.plan) == (TuningState.WATCH, BASE)


def test_plan_without_overlap_can_be_the_decision():
    tuning = profiling()
    in_two_stages = replace(BASE, segments=(Segment(1, 2, 1), Segment(3, None, 1)))
    plan = tuning.planned(Planned(in_two_stages, StepEstimate(200, 50)))
    assert (tuning.state, plan) == (TuningState.WATCH, BASE)
    assert "nothing else is expected to be faster" in tuning.lines[-1]
    assert tuning.chosen == tuning.baseline


def test_plan_that_only_deduplicates_is_not_stocks_order():
    tuning = profiling()
    deduplicated = replace(BASE, dispatch=Dispatch.DEDUP)
    in_two_stages = replace(deduplicated, segments=(Segment(1, 2, 1), Segment(3, None, 1)))
    assert tuning.planned(Planned(in_two_stages, StepEstimate(150, 20))) == deduplicated
    assert tuning.state is TuningState.VERIFY


@pytest.mark.parametrize(("other_ms", "kept"), [(150, OTHER), (199, OTHER), (201, BASE)])
def test_profiled_plan_is_tried_although_none_is_expected_to_pay(other_ms, kept):
    tuning = profiling()
    assert tuning.planned(Planned(BASE, StepEstimate(200, 50), profiled={"four": (OTHER, 160.0)})) == OTHER
    plan = run(tuning, stats(other_ms), NUM_SETTLE_STEPS)
    assert plan == (None if kept == OTHER else BASE)
    assert (tuning.plan, tuning.state) == (kept, TuningState.WATCH)


def test_plan_of_a_short_run_is_not_judged():
    tuning = TuningController(NUM)
    assert tuning.give_up(PLAN, "too short") == PLAN
    assert tuning.lines == ["too short"]
    assert (tuning.state, tuning.settled, tuning.chosen) == (TuningState.FIXED, True, None)


def test_controller_without_a_plan_changes_nothing():
    tuning = profiling()
    plan = tuning.planning_failed("no plan fits")
    assert (tuning.state, tuning.plan, plan) == (TuningState.WATCH, BASE, BASE)
    assert tuning.lines[-1] == f"no plan fits; the plan stays {BASE}"


def test_plan_from_a_checkpoint_is_measured_and_not_judged():
    tuning = TuningController(NUM)
    assert tuning.take_over(PLAN, None, None, "from the checkpoint") == PLAN
    assert tuning.settled
    plan = run(tuning, stats(1e6), NUM_TUNING_WARM_UP_STEPS)
    assert (plan, tuning.plan, tuning.state) == (None, PLAN, TuningState.WATCH)
    assert tuning.baseline is None


@pytest.mark.parametrize("exposed_ms", [1.0, 40.0])
def test_drift_of_exposed_time_starts_planning(exposed_ms):
    tuning = watching(exposed_ms=20.0)
    for _ in range(MIN_STEPS_BETWEEN_PLANS // NUM):
        assert run(tuning, stats(150, 20)) is None
        assert tuning.state is TuningState.WATCH
    for _ in range(NUM_DRIFT_WINDOWS - 1):
        assert run(tuning, stats(170, exposed_ms)) is None
        assert tuning.state is TuningState.WATCH
    assert run(tuning, stats(170, exposed_ms)) is None
    assert tuning.state is TuningState.PROFILE
    assert tuning.lines[-1] == (
        f"exposed time is {exposed_ms} ms a step for {NUM_DRIFT_WINDOWS * NUM} steps, 20.0 ms when the plan was "
        "chosen: planning anew"
    )
    # The new plan is judged by what the old one takes now, and the way back is to the old one.
    assert tuning.planned(Planned(OTHER, StepEstimate(140, 5))) == OTHER
    assert run(tuning, stats(180, 5), NUM_SETTLE_STEPS) == PLAN
    assert (tuning.chosen, tuning.num_plans) == (stats(170, exposed_ms), 2)


def test_temporary_change_of_exposed_time_is_no_drift():
    tuning = watching(exposed_ms=20.0)
    for _ in range(2 * MIN_STEPS_BETWEEN_PLANS // NUM):
        for exposed_ms in [40.0] * (NUM_DRIFT_WINDOWS - 1) + [20.0]:
            assert run(tuning, stats(150, exposed_ms)) is None
            assert tuning.state is TuningState.WATCH


def test_planning_after_drift_has_a_minimum_distance():
    tuning = watching(exposed_ms=20.0)
    num_steps = NUM_SETTLE_STEPS + NUM  # since the plan was made
    while tuning.state is TuningState.WATCH:
        assert run(tuning, stats(170, 60)) is None
        num_steps += NUM
    num_steps -= NUM
    assert MIN_STEPS_BETWEEN_PLANS <= num_steps + NUM < MIN_STEPS_BETWEEN_PLANS + NUM
    tuning.planned(Planned(PLAN, StepEstimate(165, 60)))
    assert run(tuning, stats(170, 60), NUM_SETTLE_STEPS) is None, "what is usual now is what it showed last"
    assert tuning.state is TuningState.WATCH
