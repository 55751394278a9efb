"""Every way through warm-up, profile, race and watch, as a script of figures."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from megatron_lancet.features.dedup.order import DEDUP
from megatron_lancet.features.tuning.controller import (
    MIN_STEPS_BETWEEN_PLANS,
    NUM_DRIFT_WINDOWS,
    Planned,
    TuningController,
    TuningState,
)
from megatron_lancet.features.tuning.race import MIN_TURNS, NUM_FIRST_SETTLE_STEPS, NUM_SETTLE_STEPS, Candidate
from megatron_lancet.plan_words import plan_in_words, plan_text
from megatron_lancet.planning.estimate import StepEstimate
from megatron_lancet.schedule.plan import Plan, Segment, fixed_plan, paired, plan_without_overlap
from megatron_lancet.training.observe.step_stats import NUM_WARM_UP_STEPS, StepTimes

NUM, TURN = 6, 2
PLAN, OTHER = fixed_plan(2), fixed_plan(4)
BASE = plan_without_overlap()
KERNEL = Candidate(replace(BASE, fused_attention=True), "no overlap, fused attention")


def measure(tuning: TuningController, step_ms: float, exposed_ms: float = 50.0, num_unmeasured: int = 0) -> Plan | None:
    """Steps up to the next decision: exactly as many as announced."""
    num = tuning.num_measured_steps
    assert [tuning.step_done() for _ in range(num_unmeasured + num)] == [False] * (num_unmeasured + num - 1) + [True]
    return tuning.decide([StepTimes(step_ms, exposed_ms, 100.0)] * num)


def profiling(baseline_ms: float = 200.0) -> TuningController:
    tuning = TuningController(NUM)
    assert (tuning.state, tuning.plan) == (TuningState.WARM_UP, BASE)
    assert [tuning.step_done() for _ in range(NUM_WARM_UP_STEPS)] == [False] * (NUM_WARM_UP_STEPS - 1) + [True]
    assert (tuning.num_measured_steps, tuning.decide([])) == (0, None)
    assert tuning.state is TuningState.PROFILE
    tuning.profiled_first(fixed_plan(1), [StepTimes(baseline_ms, 50.0, 100.0)] * 3)
    return tuning


def planned(*plans: Plan, **others) -> Planned:
    return Planned(tuple(Candidate(plan, prediction=StepEstimate(148.0, 10.0)) for plan in plans), **others)


def race(
    tuning: TuningController, step_ms: Mapping[Plan, float], exposed_ms: float = 10.0, seen: tuple[Plan, ...] = ()
) -> list[Plan]:
    """Turns until a plan has won, by plan.

    Args:
        seen: plans that have had a turn before, the last one last.
    """
    plans: list[Plan] = []
    while tuning.state is TuningState.RACE:
        plan = tuning.plan
        num_unmeasured = NUM_SETTLE_STEPS if plan in (*seen, *plans) else NUM_FIRST_SETTLE_STEPS
        if [*seen, *plans][-1:] == [plan]:
            num_unmeasured = 0
        plans.append(plan)
        assert measure(tuning, step_ms[plan], exposed_ms, num_unmeasured) == tuning.plan
    return plans


def watching(exposed_ms: float = 10.0) -> TuningController:
    tuning = profiling()
    tuning.planned(planned(PLAN))
    race(tuning, {BASE: 200, PLAN: 150}, exposed_ms)
    assert (tuning.state, tuning.plan, tuning.settled) == (TuningState.WATCH, PLAN, True)
    assert tuning.num_measured_steps == NUM
    return tuning


def watch(
    tuning: TuningController, step_ms: float, exposed_ms: float, num_windows: int, num_unmeasured: int = 0
) -> None:
    for index in range(num_windows):
        assert tuning.state is TuningState.WATCH
        assert measure(tuning, step_ms, exposed_ms, 0 if index else num_unmeasured) is None


def test_step_that_graphs_made_faster_is_no_drift():
    tuning = watching(exposed_ms=10)
    assert not tuning.step_done()  # the rest of this window has graphs
    tuning.step_changed()
    num_windows = 2 * MIN_STEPS_BETWEEN_PLANS // NUM
    watch(tuning, 100, 40, num_windows, num_unmeasured=NUM_SETTLE_STEPS)
    assert tuning.state is TuningState.WATCH
    watch(tuning, 100, 70, NUM_DRIFT_WINDOWS)
    assert tuning.state is TuningState.PROFILE
    assert "exposed time is 70.0 ms" in tuning.lines[-1]
    assert "40.0 ms before" in tuning.lines[-1]


def test_fastest_plan_is_kept():
    tuning = profiling(201)
    assert tuning.planned(planned(PLAN, OTHER, why="best of 12", no_overlap_ms=201)) == BASE
    assert not tuning.settled
    assert race(tuning, {BASE: 200, PLAN: 150, OTHER: 160}, 8) == [BASE, PLAN, OTHER, OTHER, PLAN]
    assert tuning.settled
    assert (tuning.plan, tuning.remark, tuning.prediction) == (PLAN, "", StepEstimate(148.0, 10.0))
    assert (tuning.chosen.step_ms, tuning.baseline.step_ms) == (150, 200)
    assert tuning.lines == [
        f"{plan_in_words(fixed_plan(1))}: 201.0 ms a step, 50.0 ms of it exposed",
        f"measuring 3 plans in turns: no overlap; {PLAN}, predicted 148.0 ms a step; {OTHER}, predicted 148.0 ms a "
        "step (best of 12)",
        f"out after 1 turn: no overlap (200.0 ms); {PLAN} takes 150.0 ms",
        f"out after 2 turns: {OTHER} (160.0 ms); {PLAN} takes 150.0 ms",
        f"{plan_text(PLAN)}: measured 150.0 ms a step, 8.0 ms of it exposed, 1.33x as fast as no overlap; predicted "
        "148.0 ms, -1.3 %",
    ]


def test_tuning_takes_at_most_the_announced_steps():
    tuning = profiling()
    num_steps = NUM_WARM_UP_STEPS + 7
    three = [fixed_plan(chunks) for chunks in (2, 3, 4)]
    tuning.planned(planned(*three, others=(Candidate(fixed_plan(5)),), kernel=KERNEL))
    ran = race(tuning, {BASE: 180, KERNEL.plan: 185, **dict.fromkeys([*three, fixed_plan(5)], 160), three[0]: 150})
    plans = dict.fromkeys(ran)
    num_steps += len(ran) * (NUM_SETTLE_STEPS + TURN) + len(plans) * (NUM_FIRST_SETTLE_STEPS - NUM_SETTLE_STEPS)
    num_steps -= NUM_SETTLE_STEPS  # the last plan of the first round is the first of the second
    assert tuning.num_steps_to_plan(7) == num_steps


def test_plan_without_overlap_is_stock():
    assert (BASE.num_chunks, BASE.dw_policy, BASE.dw_window) == (1, "none", 0)


def test_slower_plans_are_dropped():
    tuning = profiling()
    tuning.planned(planned(PLAN, OTHER))
    race(tuning, {BASE: 200, PLAN: 203, OTHER: 230})
    assert (tuning.state, tuning.plan, tuning.settled) == (TuningState.WATCH, BASE, True)
    assert tuning.remark == "no plan led no overlap by more than the noise"
    assert tuning.prediction is None
    assert tuning.lines[-1] == (
        "no overlap: measured 200.0 ms a step, 10.0 ms of it exposed, and no plan is faster by more than the noise"
    )


def test_plan_within_the_noise_of_no_overlap_is_dropped():
    tuning = profiling()
    tuning.planned(planned(PLAN))
    race(tuning, {BASE: 200, PLAN: 199.2})
    assert tuning.plan == BASE


def test_plan_that_ran_for_the_profile_can_win():
    tuning = profiling()
    tuning.planned(planned(PLAN, others=(Candidate(OTHER),)))
    race(tuning, {BASE: 200, PLAN: 190, OTHER: 160})
    assert tuning.plan == OTHER
    assert tuning.remark == "another plan than the one predicted fastest won"
    assert "predicted" not in tuning.lines[-1]


def test_prediction_that_is_far_off_is_said():
    tuning = profiling()
    tuning.planned(planned(PLAN))
    race(tuning, {BASE: 200, PLAN: 180})
    assert tuning.lines[-1].endswith("predicted 148.0 ms, -17.8 %, which is far off")


def test_line_tells_what_overlap_and_what_the_kernel_gave():
    tuning = profiling()
    tuning.planned(planned(PLAN, kernel=KERNEL))
    with_it = replace(PLAN, fused_attention=True)
    race(tuning, {BASE: 200, KERNEL.plan: 160, PLAN: 150, with_it: 125})
    assert (tuning.plan, tuning.prediction) == (with_it, None)
    assert tuning.lines[-1] == (
        f"{plan_text(with_it)}: measured 125.0 ms a step, 10.0 ms of it exposed, 1.60x as fast as no overlap; the "
        "attention kernel alone gave 1.25x"
    )


def test_plan_that_fails_is_dropped_and_said():
    tuning = profiling()
    tuning.planned(planned(PLAN, OTHER))
    assert measure(tuning, 200, num_unmeasured=NUM_FIRST_SETTLE_STEPS) == PLAN
    assert tuning.plan_failed("the model lacks it") == OTHER
    assert tuning.lines[-1] == f"{PLAN} is out: the model lacks it"
    race(tuning, {BASE: 200, OTHER: 150}, seen=(BASE,))
    assert tuning.plan == OTHER


def test_no_overlap_stays_if_the_only_plan_fails():
    tuning = profiling()
    tuning.planned(planned(PLAN))
    assert measure(tuning, 200, num_unmeasured=NUM_FIRST_SETTLE_STEPS) == PLAN
    assert tuning.plan_failed("the model lacks it") == BASE
    assert (tuning.state, tuning.chosen.step_ms) == (TuningState.WATCH, 200)


def test_batch_that_grows_during_a_race_is_measured_anew():
    tuning = profiling()
    tuning.planned(planned(paired(BASE)))
    assert not any(tuning.step_done(4) for _ in range(NUM_FIRST_SETTLE_STEPS + 1))
    steps = [tuning.step_done(8) for _ in range(NUM_FIRST_SETTLE_STEPS + TURN + 1)]
    assert steps == [False] * (NUM_FIRST_SETTLE_STEPS + TURN) + [True]
    assert tuning.lines[-1] == "a step has 8 micro-batches now, 4 before: measuring anew"


def test_baseline_of_a_smaller_batch_is_forgotten():
    """A kept profile measures no overlap, which leaves the race before the batch grows."""
    tuning = profiling()
    tuning.profiled_first(BASE, [StepTimes(201.0, 50.0, 100.0)] * 3)
    assert tuning.baseline.step_ms == 201
    tuning.planned(planned(PLAN, OTHER, no_overlap_ms=201))
    for step_ms in (200.0, 150.0, 160.0):
        while not tuning.step_done(4):
            pass
        tuning.decide([StepTimes(step_ms, 10.0, 100.0)] * TURN)
    assert tuning.lines[-1].startswith("out after 1 turn: no overlap")
    assert not tuning.step_done()
    race(tuning, {PLAN: 300, OTHER: 320}, seen=(PLAN, OTHER))
    assert (tuning.plan, tuning.chosen.step_ms, tuning.baseline, tuning.compared) == (PLAN, 300, None, None)


def test_only_plan_is_no_overlap():
    tuning = profiling()
    in_two_stages = replace(BASE, segments=(Segment(1, 2, 1), Segment(3, None, 1)))
    assert tuning.planned(planned(in_two_stages)) == BASE
    assert (tuning.state, tuning.settled, tuning.baseline) == (TuningState.VERIFY, True, None)
    assert measure(tuning, 210, num_unmeasured=NUM_FIRST_SETTLE_STEPS) is None
    assert (tuning.state, tuning.chosen.step_ms) == (TuningState.WATCH, 210)
    assert tuning.chosen == tuning.baseline
    assert tuning.prediction == StepEstimate(148.0, 10.0)


def test_plan_that_only_deduplicates_races():
    tuning = profiling()
    deduplicated = replace(BASE, dispatch=DEDUP)
    tuning.planned(planned(replace(deduplicated, segments=(Segment(1, 2, 1), Segment(3, None, 1)))))
    assert race(tuning, {BASE: 200, deduplicated: 150}) == [BASE, deduplicated, deduplicated, BASE]
    assert tuning.plan == deduplicated


def test_plan_of_a_short_run_is_not_judged():
    tuning = TuningController(NUM)
    assert tuning.give_up(PLAN, "too short") == PLAN
    assert tuning.lines == ["too short"]
    assert (tuning.state, tuning.settled, tuning.chosen) == (TuningState.FIXED, True, None)


def test_controller_without_a_plan_changes_nothing():
    tuning = profiling()
    plan = tuning.planning_failed("no plan fits")
    assert (tuning.state, tuning.plan, plan) == (TuningState.VERIFY, BASE, BASE)
    assert tuning.lines[-1] == f"no plan fits; the plan stays {BASE}"
    assert measure(tuning, 240, num_unmeasured=NUM_FIRST_SETTLE_STEPS) is None
    assert (tuning.state, tuning.baseline.step_ms) == (TuningState.WATCH, 240), "the profile's step hid messages"


def test_plan_from_a_checkpoint_is_measured_and_not_judged():
    tuning = TuningController(NUM)
    assert tuning.take_over(PLAN, None, None, "from the checkpoint") == PLAN
    assert tuning.settled
    plan = measure(tuning, 1e6, num_unmeasured=NUM_WARM_UP_STEPS)
    assert (plan, tuning.plan, tuning.state) == (None, PLAN, TuningState.WATCH)
    assert tuning.baseline is None


@pytest.mark.parametrize("exposed_ms", [1.0, 40.0])
def test_drift_of_exposed_time_starts_another_race(exposed_ms):
    tuning = watching(exposed_ms=20.0)
    watch(tuning, 150, 20, MIN_STEPS_BETWEEN_PLANS // NUM, NUM_FIRST_SETTLE_STEPS)
    watch(tuning, 170, exposed_ms, NUM_DRIFT_WINDOWS)
    assert tuning.state is TuningState.PROFILE
    assert tuning.lines[-1] == (
        f"exposed time is {exposed_ms} ms a step for {NUM_DRIFT_WINDOWS * NUM} steps, 20.0 ms before: planning anew"
    )
    # The present plan and no overlap are in the race, too.
    tuning.planned(planned(OTHER))
    race(tuning, {BASE: 220, OTHER: 180, PLAN: 170}, exposed_ms)
    assert (tuning.plan, tuning.chosen.step_ms, tuning.num_plans) == (PLAN, 170, 2)
    assert tuning.prediction is None, "the known one is older than the drift"


def test_paired_plan_stays_if_planning_fails_after_drift():
    only_paired = paired(BASE)
    tuning = profiling()
    tuning.planned(planned(only_paired))
    race(tuning, {BASE: 200, only_paired: 150})
    assert tuning.plan == only_paired
    watch(tuning, 150, 10, MIN_STEPS_BETWEEN_PLANS // NUM, NUM_FIRST_SETTLE_STEPS)
    watch(tuning, 250, 120, NUM_DRIFT_WINDOWS)
    assert tuning.state is TuningState.PROFILE
    assert tuning.planning_failed("no costs") == only_paired


def test_temporary_change_of_exposed_time_is_no_drift():
    tuning = watching(exposed_ms=20.0)
    watch(tuning, 150, 20, 1, NUM_FIRST_SETTLE_STEPS)
    for _ in range(2 * MIN_STEPS_BETWEEN_PLANS // NUM):
        watch(tuning, 150, 40.0, NUM_DRIFT_WINDOWS - 1)
        watch(tuning, 150, 20.0, 1)
    assert tuning.state is TuningState.WATCH


def test_planning_after_drift_has_a_minimum_distance():
    tuning = watching(exposed_ms=20.0)
    num_race_steps = 2 * (NUM_FIRST_SETTLE_STEPS + NUM_SETTLE_STEPS + MIN_TURNS * TURN)
    num_windows = -(-(MIN_STEPS_BETWEEN_PLANS - num_race_steps - NUM_FIRST_SETTLE_STEPS) // NUM)
    watch(tuning, 170, 60, num_windows, NUM_FIRST_SETTLE_STEPS)
    assert tuning.state is TuningState.PROFILE
