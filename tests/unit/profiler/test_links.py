"""Curves through made-up measurements."""

import pytest

from megatron_lancet.planning.measured.fit import fit
from megatron_lancet.profiler.links import _busiest_bytes, _busiest_ms, _even, _sizes, _uneven


def test_link_curve_of_a_straight_line_has_two_points():
    points = [(size, 1.0 + size / 1000) for size in (1000, 4000, 16000, 64000)]
    assert fit(points) == ((1000, 2.0), (64000, 65.0))


def test_link_curve_keeps_a_bend():
    flat_then_steep = [(1000, 1.0), (4000, 1.0), (16000, 1.0), (64000, 4.0), (256000, 16.0)]
    assert [size for size, _ in fit(flat_then_steep)] == [1000, 16000, 256000]


def test_link_curve_is_monotonic():
    curve = fit([(1000, 3.0), (4000, 1.0), (16000, 8.0)])
    assert curve == ((1000, 2.0), (4000, 2.0), (16000, 8.0))


def test_link_curve_takes_the_median_of_equal_sizes():
    assert fit([(1000, 1.0), (1000, 9.0), (1000, 2.0), (4000, 10.0)]) == ((1000, 2.0), (4000, 10.0))


def test_link_curve_ignores_slopes_of_nearly_equal_sizes():
    curve = fit([(1000, 2.0), (4000, 10.0), (100_000, 40.0), (100_016, 44.0)])
    assert curve[-1] == (100_016, 42.0)
    assert curve[-2][0] <= 4000


def test_link_curve_has_few_points():
    points = [(4**power, 4**power * (1.5 if power % 2 else 1.0)) for power in range(5, 17)]
    assert len(fit(points)) <= 8


@pytest.mark.parametrize("largest", [10, 1024, 5000, 1 << 20])
def test_link_sweep_sizes_cover_the_largest_message(largest):
    sizes = _sizes(largest)
    assert sizes[0] == 1024
    assert sizes[-1] >= largest
    assert sizes == sorted(set(sizes))


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_link_measurement_rows_have_the_requested_bytes(num_ranks):
    even, uneven = _even(1 << 16, num_ranks), _uneven(1 << 16, num_ranks, both_ways=False)
    assert _busiest_bytes(even) == pytest.approx(1 << 16, rel=0.01)
    assert _busiest_bytes(uneven) == pytest.approx(1 << 16, rel=0.01)
    assert all(rows[rank][rank] == 0 for rows in (even, uneven) for rank in range(num_ranks))
    assert len({sum(column) for column in zip(*uneven, strict=True)}) == 2
    both = _uneven(1 << 16, num_ranks, both_ways=True)
    assert all(both[i][j] == both[j][i] for i in range(num_ranks) for j in range(num_ranks))


TWO = [(0, 0), (0, 1)]


def test_message_time_is_that_of_the_last_rank_to_launch():
    late_second, late_first = ([90.0, 60.0], [60.0, 62.0]), ([61.0, 64.0], [95.0, 60.0])
    ranks = list(zip(late_second, late_first, strict=True))
    assert _busiest_ms(_even(1 << 16, 2), TWO, ranks) == (60.5, 61.5)


def test_message_size_is_that_of_the_rank_that_receives_most():
    ranks = [[[60.0, 50.0]], [[30.0, 20.0]]]
    assert _busiest_ms(_uneven(1 << 16, 2, both_ways=False), TWO, ranks) == (60.0, 50.0)
    swapped = [(0, 1), (0, 0)]
    assert _busiest_ms(_uneven(1 << 16, 2, both_ways=False), swapped, ranks) == (30.0, 20.0)


def test_link_time_is_that_of_the_slowest_group():
    two_groups = [(0, 0), (0, 1), (2, 0), (2, 1)]
    ranks = [[[10.0, 5.0]], [[11.0, 5.0]], [[20.0, 9.0]], [[22.0, 9.0]]]
    assert _busiest_ms(_even(1 << 16, 2), two_groups, ranks) == (20.0, 9.0)
    assert _busiest_ms(_uneven(1 << 16, 8, both_ways=True), [(0, 3)], [[[7.0, 6.0]]]) == (7.0, 6.0)


def test_where_ranks_share_what_leaves_node_last_one_counts():
    """Two groups of a rank on each of two nodes. The rows of one group are sent before those of the other."""
    places = [(0, 0), (1, 0), (0, 1), (1, 1)]
    first, last = [[60.0, 118.0]] * 3, [[120.0, 122.0]] * 3
    ranks = [first, last, first, last]
    rows = _even(1 << 16, 2)
    assert _busiest_ms(rows, places, ranks, share_what_leaves=True) == (120.0, 120.0)
    turns = [[first[0], last[0], first[0]], [last[0], first[0], last[0]]]
    assert _busiest_ms(rows, places, [*turns, *turns], share_what_leaves=True)[0] == 120.0
