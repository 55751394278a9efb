"""The sentence of a run's gain, and when tuning had paid for itself."""

from dataclasses import replace

import pytest

from megatron_lancet.features.tuning.controller import NO_OVERLAP
from megatron_lancet.features.tuning.pay_off import PayOff
from megatron_lancet.features.tuning.race import Candidate, Race
from megatron_lancet.features.tuning.report import speed_up, tuning_text
from megatron_lancet.files.records import to_plain
from megatron_lancet.report.compared import Compared
from megatron_lancet.schedule.plan import fixed_plan
from megatron_lancet.training.observe.step_stats import NUM_WARM_UP_STEPS, StepTimes

COMPARED = Compared(744.0, 523.0, 283.0, 63.0, 10)
FIGURES = "744 ms -> 523 ms a step, exposed 38 % -> 12 %; measured in turns, n=10"


def tuned(num_tuned: int, tuned_ms: float, num_settled: int, settled_ms: float) -> PayOff:
    found = PayOff()
    for step in range(1, NUM_WARM_UP_STEPS + 1):
        found.add(step, 10_000.0, None, False, 4)  # any run's first steps are slow
    for step in range(num_tuned):
        is_last = step == num_tuned - 1
        found.add(NUM_WARM_UP_STEPS + 1 + step, tuned_ms, COMPARED if is_last else None, False, 4)
    for step in range(num_settled):
        found.add(NUM_WARM_UP_STEPS + num_tuned + 1 + step, settled_ms, COMPARED, True, 4)
    return found


def test_tuning_pays_when_saved_time_reaches_its_cost():
    # 10 steps cost 100 ms each; one step saves 221 ms.
    assert tuned(10, 844.0, 20, 523.0).since_step == NUM_WARM_UP_STEPS + 10 + 5
    assert tuned(10, 844.0, 20, 523.0).as_text(COMPARED) == "tuning cost 1.0 s and had paid for itself after step 18"
    assert tuned(10, 844.0, 2, 523.0).as_text(COMPARED) == (
        "tuning cost 1.0 s and has not paid for itself yet: 0.6 s are left, about 3 steps at 221 ms each"
    )


def test_tuning_that_later_falls_behind_has_not_paid():
    found = tuned(10, 844.0, 20, 523.0)
    found.add(100, 60_000.0, COMPARED, True, 4)
    assert found.since_step is None
    assert "has not paid for itself yet" in found.as_text(COMPARED)


def test_a_second_search_costs_time_too():
    found = tuned(10, 844.0, 20, 523.0)
    again = replace(COMPARED, no_overlap_ms=900.0, own_ms=600.0)
    for step in range(5):
        found.add(40 + step, 1000.0, again if step == 4 else COMPARED, False, 4)
    assert found.cost_ms == pytest.approx(10 * 100 + 5 * 100)
    assert found.balance_ms == pytest.approx(20 * 221 - 1500)
    found.add(45, 600.0, again, True, 4)
    assert found.balance_ms == pytest.approx(20 * 221 - 1500 + 300)


def test_a_second_search_without_a_plan_costs_time_too():
    found = tuned(10, 844.0, 20, 523.0)
    found.add(40, 1000.0, COMPARED, False, 4)
    found.add(41, 523.0, COMPARED, True, 4)
    assert found.cost_ms == pytest.approx(10 * 100 + 256)


def test_steps_of_another_batch_do_not_count():
    found = PayOff()
    for step in range(NUM_WARM_UP_STEPS):
        found.add(step + 1, 10_000.0, None, False, 2)
    found.add(10, 400.0, None, False, 2)
    found.add(11, 844.0, COMPARED, False, 4)
    assert found.cost_ms == pytest.approx(100)
    found.add(12, 523.0, COMPARED, True, 4)
    found.add(13, 1046.0, COMPARED, True, 8)
    assert found.balance_ms == pytest.approx(221 - 100)


def test_tuning_to_no_overlap_saves_nothing():
    same = Compared(744.0, 744.0, 283.0, 283.0, 10)
    assert tuned(10, 844.0, 5, 744.0).as_text(same) == "tuning cost 1.0 s, which its plan does not save"
    on_a_faster_machine = tuned(10, 844.0, 20, 600.0)
    assert on_a_faster_machine.since_step is not None
    assert on_a_faster_machine.as_text(same) == "tuning cost 1.0 s, which its plan does not save"


def test_tuning_with_fast_steps_costs_nothing():
    found = tuned(10, 700.0, 1, 523.0)
    assert found.as_text(COMPARED) == "tuning cost no time: its steps were no slower than without overlap"


def tuning(compared: Compared | None = COMPARED, **values) -> dict:
    plain = None if compared is None else to_plain(compared)
    return {"compared": plain, "overlaps": True, "has_kernel": False, "kernel_gain": None, **values}


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (tuning(), f"1.42x faster than without overlap on this machine ({FIGURES})"),
        (tuning(kernel_gain=1.1), f"1.42x faster than without overlap on this machine ({FIGURES})"),
        (
            tuning(kernel_gain=1.1, has_kernel=True),
            f"1.42x faster than without overlap on this machine ({FIGURES}; the attention kernel alone gave 1.10x)",
        ),
        (
            tuning(overlaps=False, won_by=""),
            "no plan was faster than without overlap on this machine by more than the noise (744 ms a step, exposed "
            "38 %; measured in turns, n=10)",
        ),
        (
            tuning(overlaps=False, won_by="one row per token and rank"),
            f"1.42x faster on this machine by one row per token and rank; nothing is overlapped ({FIGURES})",
        ),
        (
            tuning(None, how="not finished: the run ended during race", baseline={"step_ms": 600.0}),
            "no plan was compared with no overlap in this run: tuning not finished: the run ended during race; without "
            "overlap a step took 600 ms",
        ),
    ],
)
def test_a_run_says_what_its_plan_brought(values, sentence):
    assert speed_up(values) == sentence


def test_the_lines_on_tuning_end_with_its_cost():
    values = {"how": "planned", "num_plans": 1, "baseline": None, "predicted": None, "chosen": None}
    assert tuning_text({**values, "pay_off": "tuning cost 1.0 s"})[-1] == "  tuning cost 1.0 s"
    assert len(tuning_text({**values, "pay_off": None})) == 1


def test_a_plan_that_joins_late_did_not_run_in_turns():
    kernel = Candidate(replace(NO_OVERLAP.plan, fused_attention=True))
    with_it = Candidate(replace(fixed_plan(2), fused_attention=True))
    race = Race([NO_OVERLAP, kernel, Candidate(fixed_plan(2))], NO_OVERLAP, kernel)
    step_ms = {NO_OVERLAP.plan: 200.0, kernel.plan: 180.0, fixed_plan(2): 150.0, with_it.plan: 120.0}
    while race.winner is None:
        race.turn_done([StepTimes(step_ms[race.plan], 0.0, 0.0)] * 2)
    compared = race.compared(with_it)
    assert compared == Compared(200.0, 120.0, 0.0, 0.0, 4, in_turns=False)
    assert compared.figures().endswith("measured one after the other, n=4")


def test_a_race_compares_as_many_steps_of_each():
    plan = Candidate(fixed_plan(2))
    race = Race([NO_OVERLAP, plan], NO_OVERLAP, None)
    assert race.compared(plan) is None
    for ms, exposed_ms in ((200.0, 50.0), (150.0, 10.0), (210.0, 60.0)):
        race.turn_done([StepTimes(ms, exposed_ms, 0.0)] * 2)
    assert race.compared(plan) == Compared(200.0, 150.0, 50.0, 10.0, 2)
