"""Whether experts change their ranks: gain on steps that the choice has not seen, noise, and the cost of moving."""

import dataclasses

import pytest

from megatron_lancet.planning.load.expert_load import ExpertLoad, LayerLoad
from megatron_lancet.planning.load.placement import contiguous, swapped
from megatron_lancet.planning.load.rebalance import STAY, Costs, decide, most_sent

COSTS = Costs(exposed_ms=100.0, noise_ms=5.0, expert_bytes=1_000_000, ms_per_byte=1e-5, num_steps=50)
SKEWED, EVEN, OTHER = (80, 60, 10, 10), (40, 40, 40, 40), (10, 80, 60, 10)
PLACEMENTS = {1: contiguous(4), 2: contiguous(4)}


def load(first_layer, second_layer=EVEN):
    return ExpertLoad(5, 2, (LayerLoad(1, (first_layer,) * 2), LayerLoad(2, (second_layer,) * 2)))


def test_a_lasting_skew_moves_experts_of_its_layer():
    found = decide(load(SKEWED), load(SKEWED), PLACEMENTS, COSTS)
    assert list(found.swaps) == [1]
    after = swapped(PLACEMENTS[1], found.swaps[1])
    assert {0, 1}.isdisjoint(after[:2]) is {0, 1}.isdisjoint(after[2:]) is False
    assert (found.before, found.after) == (pytest.approx(1.75), pytest.approx(1.125))
    # The most loaded ranks of both layers together have 280 + 160 rows, and 100 fewer afterwards.
    assert found.gain_ms == pytest.approx(100 * 100 / 440)
    assert found.move_ms == pytest.approx(1 * 10.0)


@pytest.mark.parametrize(
    ("first", "second"), [(SKEWED, EVEN), (SKEWED, OTHER), (EVEN, SKEWED), (EVEN, EVEN), ((0, 0, 0, 0), SKEWED)]
)
def test_a_skew_that_does_not_last_moves_nothing(first, second):
    assert decide(load(first), load(second), PLACEMENTS, COSTS) == STAY


@pytest.mark.parametrize("changes", [{"noise_ms": 30.0}, {"exposed_ms": 1.0}, {"ms_per_byte": 1e-2}, {"num_steps": 0}])
def test_a_gain_below_noise_or_cost_moves_nothing(changes):
    assert decide(load(SKEWED), load(SKEWED), PLACEMENTS, dataclasses.replace(COSTS, **changes)) == STAY


def test_a_layer_whose_own_gain_is_too_small_stays():
    slightly = (41, 40, 40, 39)
    few_steps = dataclasses.replace(COSTS, num_steps=20)
    found = decide(load(SKEWED, slightly), load(SKEWED, slightly), PLACEMENTS, few_steps)
    assert list(found.swaps) == [1]


def test_the_decision_starts_from_the_present_placement():
    placements = {**PLACEMENTS, 1: (0, 2, 1, 3)}
    assert decide(load(SKEWED), load(SKEWED), placements, COSTS) == STAY


def test_a_run_without_rows_stays():
    assert decide(load((0,) * 4, (0,) * 4), load((0,) * 4, (0,) * 4), PLACEMENTS, COSTS) == STAY


def test_experts_that_stay_on_their_rank_are_not_sent():
    assert most_sent((0, 1, 2, 3), (1, 0, 2, 3), 2) == 0
    assert most_sent((0, 1, 2, 3), (2, 1, 0, 3), 2) == 1
    assert most_sent((0, 1, 2, 3), (2, 3, 0, 1), 2) == 2
