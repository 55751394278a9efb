"""Distinct rows: the expected number against counting, and recorded ones."""

import dataclasses
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.synthetic_profile import Machine, synthetic_profile
from megatron_lancet.planning.distinct_rows import DistinctParts, HopParts, expected_part_of_tokens
from megatron_lancet.planning.profile import ChunkRouting, HopRows
from megatron_lancet.schedule.nodes import Nodes
from megatron_lancet.schedule.plan import ChunkDim


def facts(num_experts: int, num_ranks: int, topk: int):
    model = synthetic_profile(Machine(shares=(1 / num_ranks,) * num_ranks, topk=topk)).model
    return dataclasses.replace(model, num_experts=num_experts)


@pytest.mark.parametrize(("num_experts", "num_ranks", "topk"), [(8, 2, 4), (8, 4, 2), (8, 4, 8), (12, 3, 5), (9, 3, 1)])
def test_expected_rows_are_those_of_all_choices_of_experts(num_experts, num_ranks, topk):
    num_local = num_experts // num_ranks
    choices = [{expert // num_local for expert in chosen} for chosen in combinations(range(num_experts), topk)]
    with_rank_0 = sum(0 in ranks for ranks in choices) / len(choices)
    assert expected_part_of_tokens(num_experts, num_local, topk) == pytest.approx(with_rank_0)
    parts = DistinctParts.of(facts(num_experts, num_ranks, topk), (1 / num_ranks,) * num_ranks)
    to_others = sum(len(ranks - {0}) for ranks in choices) / len(choices)
    plain = topk * (num_ranks - 1) / num_ranks
    assert parts.sent == pytest.approx((to_others / plain,) * num_ranks)
    assert parts.returned == pytest.approx(parts.sent)
    assert parts.of_all == pytest.approx(to_others / plain)


def test_published_layouts_send_as_many_rows_as_the_formula_says():
    """Qwen3-30B-A3B on 8 ranks: 7.00 rows of a token to others become 4.67."""
    parts = DistinctParts.of(facts(128, 8, 8), (1 / 8,) * 8)
    assert 7.0 * parts.of_all == pytest.approx(4.67, abs=0.005)


@given(
    st.lists(st.floats(0.0, 1.0), min_size=2, max_size=6).filter(lambda weights: sum(weights) > 0.1),
    st.integers(2, 4),
    st.integers(1, 12),
)
def test_distinct_rows_are_never_more_than_plain_ones(weights, num_local, topk):
    shares = [weight / sum(weights) for weight in weights]
    num_experts = num_local * len(shares)
    parts = DistinctParts.of(facts(num_experts, len(shares), min(topk, num_experts)), shares)
    assert all(0 <= part <= 1 for part in (*parts.sent, *parts.returned, parts.of_all))


def chunk(sent, sent_tokens):
    received_tokens = None if sent_tokens is None else sent_tokens[::-1]
    return ChunkRouting(1, ChunkDim.BATCH, 1, 0, sent, (100, 100), sent_tokens, received_tokens)


def test_recorded_rows_scale_the_expected_ones():
    even, expected = (0.5, 0.5), DistinctParts.of(facts(8, 2, 4), (0.5, 0.5))
    half = round(100 * expected.of_all / 2)
    found = DistinctParts.of(facts(8, 2, 4), even, [chunk((60, 40), (half - 5, 5)), chunk((60, 40), None)])
    assert found.of_all == pytest.approx(half / 100)
    assert found.sent == pytest.approx((half / 100,) * 2)
    every_row_distinct = DistinctParts.of(facts(8, 2, 4), even, [chunk((60, 40), (60, 40))])
    assert every_row_distinct.of_all == pytest.approx(1.0)


def on_nodes(num_experts: int, num_nodes: int, per_node: int, topk: int, holders: int = 1):
    model = facts(num_experts, num_nodes * per_node, topk)
    return dataclasses.replace(model, nodes=Nodes(num_nodes, per_node), expert_tp_size=holders)


@pytest.mark.parametrize(
    ("num_experts", "num_nodes", "per_node", "topk", "holders"),
    [(8, 2, 2, 4, 1), (8, 2, 2, 2, 2), (12, 3, 2, 3, 1), (8, 2, 1, 3, 2), (8, 4, 2, 8, 1)],
)
def test_expected_rows_of_hops_equal_counts_of_all_choices(num_experts, num_nodes, per_node, topk, holders):
    """Counted for the tokens that pass through the first rank of each node: one token for every choice of experts."""
    num_ranks = num_nodes * per_node
    on_rank = num_experts // num_ranks
    choices = [{expert // on_rank for expert in chosen} for chosen in combinations(range(num_experts), topk)]
    nodes_of = [{rank // per_node for rank in ranks} for ranks in choices]
    to_others = sum(len(nodes - {0}) for nodes in nodes_of) / len(choices)
    # Those of each node's first rank, to all holders of each rank of node 0 but this one itself.
    passed = num_nodes * sum(holders * sum(rank < per_node for rank in ranks) for ranks in choices) / len(choices)
    kept = num_nodes * sum(0 in ranks for ranks in choices) / len(choices)
    parts = HopParts.of(on_nodes(num_experts, num_nodes, per_node, topk, holders), (1 / num_ranks,) * num_ranks)
    for of_ranks in (parts.node_sent, parts.node_received):
        assert of_ranks == pytest.approx((to_others,) * num_ranks)
    assert parts.passed_on == pytest.approx((passed,) * num_ranks)
    for of_ranks in (parts.local_sent, parts.local_received):
        assert of_ranks == pytest.approx((passed - kept,) * num_ranks)


@given(st.lists(st.floats(0.01, 1.0), min_size=4, max_size=4), st.integers(1, 6))
def test_what_is_sent_in_a_hop_arrives(weights, topk):
    shares = tuple(weight / sum(weights) for weight in weights)
    parts = HopParts.of(on_nodes(8, 2, 2, topk, 2), shares)
    assert sum(parts.node_sent) == pytest.approx(sum(parts.node_received))
    assert sum(parts.local_sent) == pytest.approx(sum(parts.local_received))
    assert max(parts.node_sent) <= min(1.0, topk) + 1e-9


def test_expected_rows_of_hops_are_scaled_to_recorded_ones():
    model, shares = on_nodes(8, 2, 2, 4), (0.25,) * 4
    expected = HopParts.of(model, shares)
    tokens = model.num_rows // model.topk
    hops = HopRows(
        *(
            tuple(round(tokens / 2 * part * factor) for part in its)
            for its, factor in (
                (expected.node_sent, 0.5),
                (expected.node_received, 0.5),
                (expected.local_sent, 0.8),
                (expected.local_received, 0.8),
            )
        )
    )
    routing = ChunkRouting(1, ChunkDim.BATCH, 2, 0, (0,) * 4, (0,) * 4, hops=hops)
    recorded = HopParts.of(model, shares, (routing,))
    assert recorded.node_received == pytest.approx([part * 0.5 for part in expected.node_received], rel=0.01)
    assert recorded.passed_on == pytest.approx([part * 0.8 for part in expected.passed_on], rel=0.01)
    assert recorded.rows(tokens / 2) == hops
