"""Routed sums that are added one layer later: our layers against Megatron's own modules, which wait for each message.

Losses, gradients, logged values and evaluations on two ranks and on four. What Megatron's modules compute then is
compared with another implementation in ``tests/bridge/test_longcat.py``.
"""

import pytest

from benchmarks.gradient_error import worst
from tests.features.shortcut.cases import CASES, IN_LAYOUTS
from tests.features.shortcut.shortcut_worker import on_four_ranks, on_two_ranks
from tests.gradient_deviations import TOLERANCE
from tests.ranks import launch

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(420)]

on_two = launch.results(on_two_ranks, 2, timeout_s=400)
on_four = launch.results(on_four_ranks, 4, timeout_s=400)


def check(results, name, case, check_gradients):
    check_gradients.equal_stock(results, name, 0.0 if case.is_exact else TOLERANCE)
    for found in (result[name] for result in results):
        assert found["zero_gradients"] == []
        assert found["state_keys_equal"]
        assert not found["keeps_input"]
        assert found["collectives"] == results[0][name]["collectives"]
        # A plan along the sequence has another kernel of attention, also in an evaluation.
        assert found["evaluation"] <= (TOLERANCE if name.startswith("sequence") else 0.0)


@pytest.mark.parametrize("name", CASES)
def test_gradients_equal_blocking_modules(on_two, name, check_gradients):
    check(on_two, name, CASES[name], check_gradients)


@pytest.mark.parametrize("name", IN_LAYOUTS)
def test_gradients_equal_blocking_modules_in_layouts(on_four, name, check_gradients):
    check(on_four, name, IN_LAYOUTS[name], check_gradients)


def test_order_of_collectives_does_not_depend_on_the_wire(on_two):
    assert on_two[0]["erratic-wire/k=1"]["collectives"] == on_two[0]["plain/k=1"]["collectives"]


def test_the_wiring_is_another_model(on_two):
    """Also in an evaluation, which runs Megatron's own forward pass."""
    assert on_two[0]["unwired"]["loss"] > 10 * TOLERANCE
    assert on_two[0]["unwired"]["evaluation"] > 10 * TOLERANCE


def test_model_of_a_checkpoint_is_wired(on_two):
    assert [result["built"]["evaluation"] for result in on_two] == [0.0, 0.0]


def test_lost_gradient_is_noticed(on_two):
    assert worst(on_two[0]["detached-experts"]["gradients"])[1] > 0.01
