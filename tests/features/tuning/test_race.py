"""Races with scripted step times: who leaves, who wins, and what the user reads."""

import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import count, cycle

import pytest

from megatron_lancet.features.dedup.order import DEDUP
from megatron_lancet.features.tuning.controller import NO_OVERLAP
from megatron_lancet.features.tuning.race import (
    MAX_TIED_TURNS,
    MAX_TURNS,
    MIN_TURNS,
    NUM_FIRST_SETTLE_STEPS,
    NUM_SETTLE_STEPS,
    Candidate,
    Race,
    has_kernel,
)
from megatron_lancet.planning.estimate import StepEstimate
from megatron_lancet.schedule.plan import ChunkDim, DwPolicy, Plan, fixed_plan, paired
from megatron_lancet.training.observe.step_stats import StepTimes, steps_of_run

BASE = NO_OVERLAP.plan
TWO, FOUR, PAIRS = fixed_plan(2), fixed_plan(4), paired(fixed_plan(1, DwPolicy.NONE))
FUSED_PAIRS = replace(PAIRS, fused_attention=True)
KERNEL = Candidate(replace(BASE, fused_attention=True), "no overlap, fused attention")
NUM = 3
type StepMs = float | Callable[[], float]


def race_of(*plans: Plan, kernel: bool = False) -> Race:
    others = [KERNEL] if kernel else []
    return Race([NO_OVERLAP, *others, *map(Candidate, plans)], NO_OVERLAP, KERNEL if kernel else None)


def turn(race: Race, step_ms: Mapping[Plan, StepMs]) -> Plan:
    """One turn of one plan."""
    plan, of_plan = race.plan, step_ms[race.plan]
    race.turn_done([StepTimes(of_plan() if callable(of_plan) else of_plan, 0.0, 0.0) for _ in range(NUM)])
    return plan


def run(race: Race, step_ms: Mapping[Plan, StepMs]) -> list[Plan]:
    """All turns, by plan."""
    plans = []
    while race.winner is None:
        plans.append(turn(race, step_ms))
        assert len(plans) < 1000
    return plans


def test_clear_winner_needs_two_turns_of_each_plan():
    race = race_of(TWO, FOUR)
    assert run(race, {BASE: 200, TWO: 150, FOUR: 170}) == [BASE, TWO, FOUR, FOUR, TWO, BASE]
    assert race.winner == Candidate(TWO)
    assert race.taken_lines() == [f"out after 2 turns: no overlap (200.0 ms), {FOUR} (170.0 ms); {TWO} takes 150.0 ms"]
    assert race.taken_lines() == []
    assert race.stats_of(NO_OVERLAP).num_steps == NUM * MIN_TURNS, "what is out keeps its figures"


@pytest.mark.parametrize(
    ("predicted_ms", "kernel_ms", "first_turn"),
    [
        (200, 190, [BASE, KERNEL.plan]),
        (200, 180, [BASE]),
        (180, 190, []),
        (300, 190, []),
        (None, 190, []),
    ],
    ids=["both are far slower", "the kernel is near", "near by prediction", "was disturbed", "not predicted"],
)
def test_no_overlap_leaves_early_if_far_slower_twice(predicted_ms, kernel_ms, first_turn):
    plans = [NO_OVERLAP, KERNEL, Candidate(TWO), Candidate(FOUR)]
    race = Race(plans, NO_OVERLAP, KERNEL, predicted_ms)
    with_it = replace(TWO, fused_attention=True)
    ran = Counter(run(race, {BASE: 200, KERNEL.plan: kernel_ms, TWO: 150, FOUR: 200, with_it: 160}))
    assert {plan for plan in ran if ran[plan] == 1} == set(first_turn)
    assert ran[FOUR] == MIN_TURNS, "a plan that overlaps may have met a disturbance"
    assert race.gain_of(Candidate(TWO)) == pytest.approx(200 / 150)
    assert race.winner.plan == TWO


def test_prediction_is_forgotten_with_another_batch():
    race = Race([NO_OVERLAP, Candidate(TWO), Candidate(FOUR)], NO_OVERLAP, None, 400)
    assert not race.begin_again(8)
    assert race.begin_again(4)
    assert Counter(run(race, {BASE: 400, TWO: 150, FOUR: 200}))[BASE] == MIN_TURNS


def test_early_end_of_no_overlap_ends_no_race():
    race = Race([NO_OVERLAP, Candidate(TWO)], NO_OVERLAP, None, 400)
    assert run(race, {BASE: 400, TWO: 150}) == [BASE, TWO, TWO, BASE]


def test_slow_plans_leave_while_others_go_on():
    race = race_of(TWO, FOUR)
    plans = run(race, {BASE: 200, TWO: 150, FOUR: 150.5})
    assert Counter(plans) == {BASE: MIN_TURNS, TWO: MAX_TURNS, FOUR: MAX_TURNS}


@pytest.mark.parametrize(
    ("step_ms", "winner"),
    [
        ({BASE: 200, TWO: 150, FOUR: 149.5}, TWO),
        ({BASE: 200, TWO: 150, FOUR: 149}, FOUR),
        ({BASE: 200, PAIRS: 150, TWO: 150.2, FOUR: 149.6}, TWO),
        ({BASE: 150.2, PAIRS: 150, TWO: 149.6}, BASE),
    ],
)
def test_tie_is_won_by_the_simplest(step_ms, winner):
    race = race_of(*(plan for plan in step_ms if plan != BASE))
    run(race, step_ms)
    assert race.winner.plan == winner


def test_stocks_order_wins_if_all_plans_are_slower():
    race = race_of(TWO, FOUR, PAIRS)
    assert len(run(race, {BASE: 200, TWO: 210, FOUR: 230, PAIRS: 205})) == 4 * MIN_TURNS
    assert race.winner is not None


@pytest.mark.parametrize(
    ("slower_ms", "winner", "num_turns"),
    [(0.4, BASE, MAX_TIED_TURNS), (2, TWO, MAX_TIED_TURNS), (3, TWO, MAX_TURNS + 1), (4.5, TWO, MAX_TURNS)],
)
def test_plans_within_half_the_noise_run_longer(slower_ms, winner, num_turns):
    """Steps of 95, 100 and 105 ms in turn: half the noise is 3.1 ms after 6 turns, 2.9 after 7, 2.2 after 12."""
    race = race_of(TWO)
    steps = {BASE: cycle([slower_ms + one for one in (95, 100, 105)]), TWO: cycle([95, 100, 105])}
    plans = run(race, {plan: partial(next, its) for plan, its in steps.items()})
    assert Counter(plans) == {BASE: num_turns, TWO: num_turns}
    assert race.winner.plan == winner


def test_only_tied_plans_go_on_where_the_noise_hides_more():
    race = race_of(TWO, FOUR)
    steps = {plan: cycle([ms - 5, ms, ms + 5]) for plan, ms in ((BASE, 100), (TWO, 100), (FOUR, 104.5))}
    plans = run(race, {plan: partial(next, its) for plan, its in steps.items()})
    assert Counter(plans) == {BASE: MAX_TIED_TURNS, TWO: MAX_TIED_TURNS, FOUR: MAX_TURNS}


def test_race_on_a_noisy_machine_is_bounded():
    noise = random.Random(0)
    race = race_of(TWO, PAIRS)
    step_ms = {plan: lambda mean=mean: noise.gauss(mean, 60) for plan, mean in ((BASE, 202), (TWO, 200), (PAIRS, 199))}
    assert len(run(race, step_ms)) <= 3 * MAX_TIED_TURNS
    assert race.winner is not None


def test_disturbed_turn_decides_nothing():
    race = race_of(TWO)
    assert turn(race, {BASE: 200}) == BASE
    assert turn(race, {TWO: 900}) == TWO
    run(race, {BASE: 200, TWO: 150})
    assert race.winner.plan == TWO


def test_slower_rank_counts():
    ranks = [[StepTimes(100, 10, 4), StepTimes(130, 0, 4)], [StepTimes(120, 20, 8), StepTimes(110, 10, 8)]]
    assert steps_of_run(ranks) == [StepTimes(120, 15, 6), StepTimes(130, 5, 6)]


def test_machine_that_becomes_slower_favours_no_plan():
    race, step_ms = race_of(TWO, FOUR), count(100)
    for _ in range(3 * MIN_TURNS):
        turn(race, dict.fromkeys((BASE, TWO, FOUR), partial(next, step_ms)))
    assert len({race.stats_of(candidate).step_ms for candidate in map(Candidate, (BASE, TWO, FOUR))}) == 1


def test_first_turn_of_a_plan_settles_longer():
    race = race_of(TWO)
    seen = []
    while race.winner is None:
        seen.append(race.num_unmeasured)
        turn(race, {BASE: 200, TWO: 150})
    assert seen == [NUM_FIRST_SETTLE_STEPS] * 2 + [0, NUM_SETTLE_STEPS]


def test_a_plan_after_one_that_failed_settles():
    """The switch to a plan that fails may have begun."""
    race = race_of(TWO, FOUR)
    turn(race, {BASE: 200})
    turn(race, {TWO: 150})
    race.drop("the model lacks it")
    assert (race.plan, race.num_unmeasured) == (TWO, NUM_SETTLE_STEPS)


def test_plan_that_fails_is_dropped():
    race = race_of(TWO, FOUR)
    turn(race, {BASE: 200})
    race.drop("the model lacks it")
    assert race.taken_lines() == [f"{TWO} is out: the model lacks it"]
    assert run(race, {BASE: 200, FOUR: 150}) == [FOUR, FOUR, BASE]
    assert race.winner.plan == FOUR


def test_no_overlap_is_left_if_all_plans_fail():
    race = race_of(TWO)
    turn(race, {BASE: 200})
    race.drop("the model lacks it")
    assert race.winner is not None


def test_growing_batch_begins_the_race_again():
    race = race_of(TWO)
    assert not race.begin_again(4)
    for plan in (BASE, TWO, TWO):
        assert turn(race, {BASE: 200, TWO: 150}) == plan
        assert not race.begin_again(4)
    assert race.begin_again(8)
    assert race.taken_lines() == ["a step has 8 micro-batches now, 4 before: measuring anew"]
    assert run(race, {BASE: 400, TWO: 500}) == [BASE, TWO, TWO, BASE]
    assert race.winner is not None


def test_attention_kernel_can_win_alone():
    race = race_of(TWO, kernel=True)
    run(race, {BASE: 200, KERNEL.plan: 150, TWO: 190})
    assert race.winner == KERNEL
    assert race.gain_of(KERNEL) == pytest.approx(200 / 150)


def test_winner_gets_an_attention_kernel_that_pays():
    race, with_it = race_of(PAIRS, kernel=True), FUSED_PAIRS
    step_ms = {BASE: 200, KERNEL.plan: 180, PAIRS: 150, with_it: 135}
    first_turns = [BASE, KERNEL.plan, PAIRS, PAIRS, KERNEL.plan, BASE]
    assert run(race, step_ms) == [*first_turns, with_it, PAIRS, PAIRS, with_it]
    assert race.winner.plan == with_it
    assert race.taken_lines()[1] == (
        f"the attention kernel makes a step without overlap 1.11x as fast: trying {PAIRS} with it"
    )


@pytest.mark.parametrize(("kernel_ms", "wins"), [(220, PAIRS), (180, FUSED_PAIRS), (200, FUSED_PAIRS)])
def test_winner_gives_up_an_attention_kernel_that_is_slower(kernel_ms, wins):
    race = race_of(FUSED_PAIRS, kernel=True)
    ran = run(race, {BASE: 200, KERNEL.plan: kernel_ms, FUSED_PAIRS: 150, PAIRS: 135})
    assert race.winner.plan == wins
    assert (PAIRS in ran) is (wins == PAIRS)
    line = f"the attention kernel makes a step without overlap 0.91x as fast: trying {FUSED_PAIRS} without it"
    assert (line in race.taken_lines()) is (wins == PAIRS)


def test_kernel_that_does_not_pay_with_the_winner_is_left_out():
    race, with_it = race_of(PAIRS, kernel=True), FUSED_PAIRS
    run(race, {BASE: 200, KERNEL.plan: 180, PAIRS: 150, with_it: 160})
    assert race.winner.plan == PAIRS


def test_kernel_that_is_slower_is_tried_with_nothing():
    race = race_of(PAIRS, kernel=True)
    assert len(run(race, {BASE: 200, PAIRS: 150, KERNEL.plan: 210})) == 3 * MIN_TURNS
    assert race.winner.plan == PAIRS


@pytest.mark.parametrize(("with_it_ms", "wins"), [(149.5, True), (150.5, False)])
def test_kernel_decides_by_its_mean_where_the_noise_hides_it(with_it_ms, wins):
    race, with_it = race_of(PAIRS, kernel=True), FUSED_PAIRS
    run(race, {BASE: 200, KERNEL.plan: 199.5, PAIRS: 150, with_it: with_it_ms})
    assert (race.winner.plan == with_it) is wins


def test_late_plan_is_compared_with_steps_of_its_own_time():
    race, without_it = race_of(FUSED_PAIRS, kernel=True), PAIRS
    while "trying" not in "".join(race.taken_lines()):
        turn(race, {BASE: 200, KERNEL.plan: 220, FUSED_PAIRS: 150})
    run(race, {FUSED_PAIRS: 165, without_it: 160})  # the machine is slower now
    assert race.winner.plan == without_it
    assert race.stats_of(Candidate(FUSED_PAIRS)).num_steps == 2 * NUM * MIN_TURNS


def test_stocks_kernel_stays_where_nothing_is_faster():
    race = race_of(kernel=True)
    run(race, {BASE: 200, KERNEL.plan: 199.5})
    assert race.winner == NO_OVERLAP


def test_dws_do_not_make_a_plan_simpler():
    fill, none = (paired(fixed_plan(1, policy)) for policy in (DwPolicy.FILL, DwPolicy.NONE))
    race = race_of(none, fill)
    run(race, {BASE: 200, fill: 150, none: 150.5})
    assert race.winner.plan == fill


def test_gain_compares_the_turns_that_both_had():
    """No overlap leaves after two turns, and the machine is slower in the others."""
    race = race_of(TWO, FOUR)
    for _ in range(MIN_TURNS):
        for _ in range(3):
            turn(race, {BASE: 200, TWO: 150, FOUR: 150.5})
    run(race, {TWO: 300, FOUR: 300.5})
    assert race.stats_of(Candidate(TWO)).step_ms == 300
    assert race.gain_of(Candidate(TWO)) == pytest.approx(200 / 150)
    assert race.gain_of(None) is None


def test_sequence_chunks_have_the_kernel_already():
    sequence = fixed_plan(2, chunk_dim=ChunkDim.SEQUENCE)
    assert has_kernel(sequence)
    assert not has_kernel(TWO)
    assert not has_kernel(paired(sequence, TWO))
    race = race_of(sequence, kernel=True)
    run(race, {BASE: 200, KERNEL.plan: 180, sequence: 150})
    assert race.winner.plan == sequence


def test_order_of_turns_depends_on_shared_numbers_only():
    """Every rank has its own race; the same numbers give the same plans on each."""
    step_ms = {BASE: 200, TWO: 150, FOUR: 151, PAIRS: 170}
    first, second = (run(race_of(PAIRS, FOUR, TWO), step_ms) for _ in range(2))
    assert first == second


def test_candidate_reads_as_its_plan():
    assert str(Candidate(replace(TWO, dispatch=DEDUP), prediction=StepEstimate(1.0, 0.5))).endswith("dispatch=dedup")
    assert str(replace(TWO, fused_attention=True)).endswith(" attention=fused")
    assert str(NO_OVERLAP) == "no overlap"
