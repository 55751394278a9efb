"""Figures of popularity with known answers."""

import pytest

from megatron_lancet.planning.load.popularity import (
    counted,
    forecast_error,
    layer_popularity,
    mean_absolute_error,
    most_over_mean,
    most_popular,
    moved_share,
    shares_of,
)


def test_rows_are_counted_by_expert():
    assert counted([(0, 2), (2, 3), (2,)], 4) == (1, 0, 3, 1)
    assert shares_of((1, 0, 3, 0)) == (0.25, 0, 0.75, 0)
    assert shares_of((0, 0)) == (0.5, 0.5)


def test_of_equally_popular_experts_the_first_ones_count():
    assert most_popular((1, 3, 3, 3, 2), 2) == {1, 2}
    assert most_popular((0, 0, 0), 1) == {0}


def test_most_over_mean_is_one_for_even_load():
    assert most_over_mean((5, 5, 5)) == most_over_mean((0, 0)) == 1
    assert most_over_mean((6, 1, 1, 0)) == 3


def test_drift_is_the_share_of_rows_that_move():
    assert moved_share((0.5, 0.5, 0), (0.5, 0.5, 0)) == 0
    assert moved_share((1, 0), (0, 1)) == 1
    assert moved_share((0.5, 0.5), (0.25, 0.75)) == 0.25
    assert mean_absolute_error((0.5, 0.5), (0.25, 0.75)) == 0.25


def test_a_layers_windows():
    found = layer_popularity([(8, 0, 0, 0), (0, 8, 0, 0), (4, 4, 0, 0)], num_top=1)
    assert found.counts == (12, 12, 0, 0)
    assert found.most_over_mean == 2
    assert found.window_most_over_mean == 4
    assert found.top_share == 0.5
    assert found.drift == pytest.approx((1 + 0.5) / 2)
    assert layer_popularity([(1, 1)], 1).drift is None


def test_error_of_forecasts():
    found = forecast_error([(0.5, 0.3, 0.2), (0.5, 0.3, 0.2)], [(0.5, 0.3, 0.2), (0.2, 0.3, 0.5)], num_top=1)
    assert found is not None
    assert found.num_windows == 2
    assert found.mean_error == pytest.approx(0.1)
    assert found.other_top == 0.5
    assert forecast_error([], [], 1) is None
