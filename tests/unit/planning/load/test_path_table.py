"""Lina's table: what follows a path, and what an unknown path falls back on."""

import random

import pytest

from megatron_lancet.planning.load.path_table import PATH_LENGTH, PathTable, paths_into
from megatron_lancet.planning.load.routing_report import default_num_top, routing_of_choices, routing_of_loads


def test_paths_are_the_last_three_choices():
    choices = [[(layer,), (layer + 10,)] for layer in range(5)]
    assert paths_into(0, choices) == [(), ()]
    assert paths_into(1, choices) == [((0,),), ((10,),)]
    assert paths_into(4, choices) == [((1,), (2,), (3,)), ((11,), (12,), (13,))]
    assert len(paths_into(4, choices)[0]) == PATH_LENGTH


def test_known_paths_say_what_followed_them():
    table = PathTable(4)
    a, b = ((0,), (0,), (1,)), ((1,), (0,), (1,))
    table.learn([a, a, a, b], [(2,), (2,), (3,), (0,)])
    assert table.forecast([a]) == pytest.approx((0, 0, 2 / 3, 1 / 3))
    assert table.forecast([b]) == pytest.approx((1, 0, 0, 0))
    assert table.forecast([a, b, b]) == pytest.approx((2 / 3, 0, 2 / 9, 1 / 9))


def test_an_unknown_path_counts_by_its_last_choices():
    table = PathTable(4)
    table.learn([((0,), (0,), (1,)), ((1,), (0,), (1,)), ((3,), (3,), (3,))], [(2,), (0,), (3,)])
    assert table.forecast([((2,), (0,), (1,))]) == pytest.approx((1 / 2, 0, 1 / 2, 0))
    assert table.forecast([((2,), (2,), (3,))]) == pytest.approx((0, 0, 0, 1))
    assert table.forecast([((2,), (2,), (2,))]) == pytest.approx((1 / 3, 0, 1 / 3, 1 / 3))
    assert PathTable(2).forecast([((0,),)]) == (0.5, 0.5)


def windows_of(follows: float, num_windows: int = 8, num_tokens: int = 200, num_experts: int = 8):
    """Tokens whose second layer's choice follows from their first one's with this probability; popularity jumps."""
    dice = random.Random(1)
    found = []
    for number in range(num_windows):
        hot = dice.sample(range(num_experts), 2)
        first = [(dice.choice(hot),) if dice.random() < 0.8 else (dice.randrange(num_experts),)] + [
            (dice.choice(hot),) if dice.random() < 0.8 else (dice.randrange(num_experts),)
            for _ in range(num_tokens - 1)
        ]
        second = [
            ((expert + 3) % num_experts,) if dice.random() < follows else (dice.randrange(num_experts),)
            for (expert,) in first
        ]
        found.append({1: first, 2: second})
        assert number == len(found) - 1
    return found


def test_table_forecasts_what_follows_and_last_window_does_not():
    """Popularity jumps from window to window, so the last one says nothing of the next."""
    first, second = routing_of_choices(windows_of(follows=1), 8, num_top=2)
    assert first.path_table is None
    assert second.path_table is not None
    assert second.path_table.num_windows == 4
    assert second.path_table.mean_error == pytest.approx(0, abs=1e-9)
    assert second.path_table.other_top == 0
    assert second.last_window is not None
    assert second.last_window.num_windows == 4
    assert second.last_window.mean_error > 0.1
    assert second.last_window.other_top > 0.5


def test_where_nothing_follows_table_is_no_better_than_mean():
    """Negative control of the last test: layers that have nothing to do with each other."""
    _, second = routing_of_choices(windows_of(follows=0), 8, num_top=2)
    assert second.path_table is not None
    assert second.path_table.mean_error > 0.005
    assert second.path_table.other_top > 0.5


def test_measured_loads_have_no_choices():
    loads = [{1: (8, 2, 0, 0), 3: (5, 5, 0, 0)}, {1: (8, 2, 0, 0), 3: (0, 0, 5, 5)}]
    first, third = routing_of_loads(loads, num_top=2)
    assert (first.layer, third.layer) == (1, 3)
    assert first.last_window is not None
    assert (first.last_window.num_windows, first.last_window.mean_error, first.last_window.other_top) == (1, 0, 0)
    assert third.last_window is not None
    assert (third.last_window.mean_error, third.last_window.other_top) == (0.5, 1)
    assert first.path_table is third.path_table is None


def test_one_window_forecasts_nothing():
    (only,) = routing_of_choices([{1: [(0,), (1,)]}], 4, num_top=1)
    assert only.last_window is only.path_table is None
    assert only.popularity.counts == (1, 1, 0, 0)


@pytest.mark.parametrize(("experts", "topk", "expected"), [(64, 2, 4), (8, 2, 4), (8, 3, 4), (2, 1, 1), (1, 1, 1)])
def test_the_top_experts_are_linas_2k_but_never_most_of_all(experts, topk, expected):
    assert default_num_top(experts, topk) == expected
