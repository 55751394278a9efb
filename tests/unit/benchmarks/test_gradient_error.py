"""The distance of gradients from stock's: nothing that is wrong comes out small, and not a number is infinitely far."""

import math

import pytest
import torch

from benchmarks.gradient_error import relative_difference, relative_error, relative_errors, worst


def test_relative_error_of_finite_gradients():
    stock = torch.linspace(1, 2, 100)
    assert relative_error(stock.clone(), stock) == 0
    assert 0 < relative_error(stock * (1 + 1e-6), stock) < 2e-6
    assert relative_error(stock * 1.001, stock) == pytest.approx(1e-3, rel=0.01)
    assert relative_error(torch.zeros(3), torch.ones(3)) == 1
    assert relative_error(torch.ones(3), torch.zeros(3)) > 1e6


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_relative_error_is_infinite_where_a_side_is_not_finite(value):
    sound, damaged = torch.ones(3), torch.tensor([1.0, 1.0, value])
    assert relative_error(damaged, sound) == math.inf
    assert relative_error(sound, damaged) == math.inf
    assert relative_error(damaged, damaged.clone()) == math.inf


def test_relative_errors_of_a_parameter_on_one_side_only():
    weight = torch.ones(2)
    assert relative_errors({"a": weight, "b": weight}, {"a": weight, "c": weight}) == {
        "a": 0,
        "b": math.inf,
        "c": math.inf,
    }


def test_relative_difference_of_losses():
    assert relative_difference([1.0, 2.002], [1.0, 2.0]) == pytest.approx(1e-3)
    assert relative_difference([], []) == 0
    assert relative_difference([1.0, math.nan, 1.0], [1.0, 1.0, 1.0]) == math.inf
    assert relative_difference([math.inf], [math.inf]) == math.inf
    with pytest.raises(ValueError, match="longer"):
        relative_difference([1.0], [1.0, 1.0])


def test_worst_sees_nan_in_every_place():
    assert worst({"a": 1e-7, "b": 3e-7, "c": 2e-7}) == ("b", 3e-7)
    assert worst({"a": 1e-7, "b": math.nan}) == ("b", math.inf)
    assert worst({"a": math.nan, "b": 1e-7}) == ("a", math.inf)
    with pytest.raises(ValueError, match="empty"):
        worst({})
