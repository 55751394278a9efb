"""Paces of steps whose slowness is known."""

import pytest

from megatron_lancet.planning.measured.op_times import Samples
from megatron_lancet.planning.measured.pace import MAX_PACES, RankPaces, paces_of_rank, step_paces, typical_steps
from megatron_lancet.schedule.ops import Phase
from megatron_lancet.schedule.plan import fixed_plan
from tests.unit.profiler.synthetic import FACTS, step

F, I = Phase.FORWARD, Phase.INPUT_GRAD  # noqa: E741 - the phases' own letters


def test_pace_of_a_slow_step_is_slow_in_every_layer():
    samples = Samples()
    for plan, slowness in ((fixed_plan(1), 1.0), (fixed_plan(1), 1.0), (fixed_plan(1), 9.0), (fixed_plan(2), 1.0)):
        samples.add(step(plan, slowness), plan, FACTS)
    paces = paces_of_rank(samples.steps, samples.medians().op_ms, lambda kind: 1.0)
    assert len(paces) == 4
    assert all(factor == pytest.approx(1.0) for factor in paces[3].values())
    assert {layer for _, layer in paces[2]} >= {0, 1}
    in_layers = {place: factor for place, factor in paces[2].items() if place[1] > 0}
    for place, factor in in_layers.items():
        assert factor == pytest.approx(9.0 * paces[0][place]), place


def test_step_of_median_time_is_typical_of_its_plan():
    """The slowest rank counts; of an even number of steps the faster one of the two in the middle."""
    plans = ["one", "one", "one", "two", "two", "three"]
    first = [90.0, 10.0, 12.0, 20.0, 21.0, 30.0]
    second = [11.0, 11.0, 10.0, 20.0, 19.0, 99.0]
    assert typical_steps(plans, [first, second]) == [2, 3, 5]
    assert typical_steps(["one", "two", "one"], [[3.0, 1.0, 2.0]]) == [2, 1]


def ranks(*steps_of_rank, group=0):
    return [RankPaces(group, place, steps) for place, steps in enumerate(steps_of_rank)]


def test_paces_of_a_step_are_listed_by_rank():
    first = [{(F, 1): 1.0, (I, 1): 2.0, (F, 0): 0.5}]
    second = [{(F, 1): 1.5, (I, 1): 0.5, (F, 0): 0.5}]
    (pace,) = step_paces(ranks(first, second), ep_size=2, num_layers=2)
    assert pace.forward == ((0.5, 0.5), (1.0, 1.5), (1.0, 1.0))
    assert pace.backward == ((1.0, 1.0), (2.0, 0.5), (1.0, 1.0))


def test_pace_of_a_layer_is_that_of_the_first_group_that_has_it():
    early = ranks([{(F, 1): 2.0}], [{(F, 1): 2.0}])
    late = ranks([{(F, 1): 9.0, (F, 2): 3.0}], [{(F, 1): 9.0, (F, 2): 4.0}], group=2)
    (pace,) = step_paces(late + early, ep_size=2, num_layers=2)
    assert pace.forward[1:] == ((2.0, 2.0), (3.0, 4.0))


def test_paces_keep_a_sample_of_many_steps():
    steps = [{(F, 1): 1.0 + index / 100} for index in range(10 * MAX_PACES)]
    paces = step_paces(ranks(steps, steps), ep_size=2, num_layers=1)
    values = [pace.forward[1][0] for pace in paces]
    assert len(values) == MAX_PACES
    assert sum(values) / len(values) == pytest.approx(sum(step[F, 1] for step in steps) / len(steps), rel=0.01)
    assert values == sorted(values)


def test_paces_of_missing_ranks_are_absent():
    assert step_paces(ranks([{(F, 1): 1.0}]), ep_size=8, num_layers=1) == ()
    assert step_paces(ranks([{(F, 1): 1.0}]), ep_size=1, num_layers=1) == ()
