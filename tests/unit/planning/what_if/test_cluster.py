import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lancet.lab.what_if.cluster import Cluster, Level, fitted_level
from megatron_lancet.lab.what_if.routing import even_share, rebinned_share, zipf_share
from megatron_lancet.planning.link_times import LinkTimes
from megatron_lancet.planning.shares import merge_similar_shares

# 8 Gb/s are 10^6 bytes a ms.
FAST, SLOW = Level(80.0, 10.0), Level(8.0, 50.0)
NODES_OF_4 = Cluster(4, FAST, SLOW)


@pytest.mark.parametrize(
    ("size", "ms"),
    [
        (1, 0.0),
        (2, 0.01 + 0.7),  # one peer, all bytes
        (4, 3 * 0.01 + 0.7),  # within a node
        (8, 4 * 0.05 + 4.0),  # 4 of 7 peers are on the other node: 4 of 7 MB at 1 MB a ms
    ],
)
def test_all_to_all_time_is_that_of_its_slower_level(size, ms):
    assert NODES_OF_4.all_to_all_ms(7_000_000, size) == pytest.approx(ms)


def test_hops_have_a_level_each():
    # One peer on the other node, which gets all bytes; three peers inside.
    assert NODES_OF_4.between_nodes_ms(1_000_000, 2) == pytest.approx(0.05 + 1.0)
    assert NODES_OF_4.between_nodes_ms(1_000_000, 4) == pytest.approx(3 * 0.05 + 1.0)
    assert NODES_OF_4.inside_node_ms(1_000_000, 4) == pytest.approx(3 * 0.01 + 0.1)
    assert NODES_OF_4.inside_node_ms(1_000_000, 1) == 0.0


def test_ring_time_is_that_of_its_slowest_link():
    assert NODES_OF_4.all_reduce_ms(8_000_000, 1) == 0.0
    assert NODES_OF_4.all_reduce_ms(8_000_000, 4) == pytest.approx(2 * 3 * (0.01 + 0.2))
    assert NODES_OF_4.all_reduce_ms(8_000_000, 8) == pytest.approx(2 * 7 * (0.05 + 1.0))
    # Two members, four ranks apart: on different nodes.
    assert NODES_OF_4.all_reduce_ms(8_000_000, 2, stride=4) == pytest.approx(2 * (0.05 + 4.0))


def test_message_time_within_and_between_nodes():
    assert NODES_OF_4.message_ms(1_000_000, 3) == pytest.approx(0.01 + 0.1)
    assert NODES_OF_4.message_ms(1_000_000, 4) == pytest.approx(0.05 + 1.0)


def test_link_fit_recovers_an_alpha_beta_link():
    cluster = Cluster(4, SLOW, SLOW)
    table = tuple((size, cluster.all_to_all_ms(size, 4)) for size in (1000, 100_000, 10_000_000))
    level = fitted_level(LinkTimes(table, 0.0), 4)
    assert (level.gbps, level.latency_us) == (pytest.approx(8.0), pytest.approx(50.0))


@pytest.mark.parametrize("table", [(), ((1000, 1.0),), ((1000, 0.0), (2000, 0.0))])
def test_link_fit_of_too_few_messages_is_none(table):
    assert fitted_level(LinkTimes(table, 0.0), 4) is None


def test_link_fit_of_noise_is_the_largest_message():
    assert fitted_level(LinkTimes(((1000, 5.0), (1_000_000, 1.0)), 0.0), 2).gbps == pytest.approx(8.0)


shares = st.lists(st.floats(0.01, 1.0), min_size=1, max_size=40).map(
    lambda weights: tuple(weight / sum(weights) for weight in weights)
)


@given(shares, st.integers(1, 64))
def test_shares_over_other_ranks_are_no_more_uneven(measured, size):
    rebinned = rebinned_share(measured, size)
    assert len(rebinned) == size
    assert sum(rebinned) == pytest.approx(1.0)
    assert max(rebinned) * size <= max(measured) * len(measured) * (1 + 1e-9)
    coarse = merge_similar_shares(rebinned, 6)
    assert len({round(share, 9) for share in coarse}) <= 6
    assert sum(coarse) == pytest.approx(1.0)
    assert max(coarse) == pytest.approx(max(rebinned))


def test_shares_are_merged_and_split():
    assert rebinned_share((0.1, 0.3, 0.4, 0.2), 2) == pytest.approx((0.4, 0.6))
    assert rebinned_share((0.4, 0.6), 4) == pytest.approx((0.2, 0.2, 0.3, 0.3))


def test_zipf_shares_deal_popular_experts_in_turn():
    assert zipf_share(0.0, 8, 4) == pytest.approx(even_share(4))
    # 1 + 1/3 and 1/2 + 1/4 of 25/12.
    assert zipf_share(1.0, 4, 2) == pytest.approx((0.64, 0.36))
    tops = [max(zipf_share(exponent / 4, 64, 16)) for exponent in range(9)]
    assert tops == sorted(tops)
