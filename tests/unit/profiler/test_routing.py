"""Routing from what ranks saw."""

import dataclasses

import pytest
import torch

from megatron_lancet.planning.profile import ChunkRouting, HopRows
from megatron_lancet.profiler.routing import (
    ChunkKey,
    RankRouting,
    chunk_routing,
    hop_rows,
    received_shares,
    rows_of_step,
)
from megatron_lancet.runtime.trace import RoutedRows
from megatron_lancet.schedule.nodes import Nodes
from megatron_lancet.schedule.plan import ChunkDim, fixed_plan
from tests.unit.profiler.synthetic import FACTS, step

FIRST, SECOND = ChunkKey(1, ChunkDim.BATCH, 2, 0), ChunkKey(1, ChunkDim.BATCH, 2, 1)


def ranks_of_two_groups() -> list[RankRouting]:
    even = RoutedRows((9, 9), (9, 9))
    return [
        RankRouting(0, 0, {1: 30}, {FIRST: RoutedRows((3, 4), (2, 4)), SECOND: RoutedRows((6, 5), (5, 4))}, 0),
        RankRouting(0, 1, {1: 10}, {FIRST: RoutedRows((6, 7), (5, 6)), SECOND: RoutedRows((5, 7), (3, 6))}, 0),
        RankRouting(2, 0, {1: 20}, {FIRST: even}, 2),
        RankRouting(2, 1, {1: 20}, {FIRST: even}, 2),
    ]


def test_routing_of_chunks_is_that_of_the_first_complete_group():
    assert chunk_routing(ranks_of_two_groups(), 2) == (
        ChunkRouting(1, ChunkDim.BATCH, 2, 0, (4, 6), (9, 11), (4, 5), (5, 4)),
        ChunkRouting(1, ChunkDim.BATCH, 2, 1, (5, 5), (11, 12), (4, 3), (3, 4)),
    )


def test_rows_are_counted_by_rank_with_and_without_duplicates():
    """Three tokens, two of four experts each; the first one has both on the same rank, the last one was dropped."""
    routing_map_tE = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 0], [1, 0, 0, 1], [0, 0, 0, 0]]).bool()
    assert RoutedRows.of(routing_map_tE, 2) == RoutedRows((4, 2), (3, 2))


def test_large_groups_have_routing_of_whole_micro_batches_only():
    rows = {f"L2.c{chunk}.F.experts": RoutedRows((1,), (1,)) for chunk in (0, 1)}
    for ep_size, expected in ((2, 2), (16, 0)):
        facts = dataclasses.replace(FACTS, ep_size=ep_size)
        trace = dataclasses.replace(step(fixed_plan(2)), routed=rows)
        assert len(rows_of_step(trace, fixed_plan(2), facts)) == expected
        assert len(rows_of_step(trace, fixed_plan(1), facts)) == 2


def test_received_rows_of_an_incomplete_group_are_unknown():
    assert chunk_routing(ranks_of_two_groups()[:1], 2) == ()
    assert received_shares(ranks_of_two_groups()[:1], 2) == (0.5, 0.5)


def test_routing_shares_are_medians_over_groups():
    assert received_shares(ranks_of_two_groups(), 2) == pytest.approx((0.625, 0.375))


def test_rows_are_counted_by_node_where_nodes_are_known():
    """Four ranks with an expert each on two nodes: both on the first, one on each, and both on the last rank's node."""
    routing_map_tE = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]).bool()
    assert RoutedRows.of(routing_map_tE, 1, Nodes(2, 2)) == RoutedRows((1, 2, 2, 1), (1, 2, 2, 1), (2, 2))
    assert RoutedRows.of(routing_map_tE, 1).node_tokens == ()


def journeys(choices, nodes, experts_per_rank):
    """Rows of two hops, token by token.

    Args:
        choices: experts of each token, by holder and rank; the first holder's rows are meant.
    """
    size, per_node = nodes.num_nodes * nodes.ranks_per_node, nodes.ranks_per_node
    node_sent, node_received, local_sent, local_received = ([0] * size for _ in range(4))
    for holder, of_holder in enumerate(choices):
        for source, tokens in enumerate(of_holder):
            for experts in tokens:
                ranks = {expert // experts_per_rank for expert in experts}
                for node in {rank // per_node for rank in ranks}:
                    via = node * per_node + source % per_node
                    if holder == 0 and via != source:
                        node_sent[source] += 1
                        node_received[via] += 1
                    for rank in ranks:
                        if rank // per_node == node:
                            if holder == 0:  # to all holders but itself
                                local_sent[via] += len(choices) - (via == rank)
                            local_received[rank] += holder > 0 or via != rank
    return HopRows(tuple(node_sent), tuple(node_received), tuple(local_sent), tuple(local_received))


@pytest.mark.parametrize("expert_tp_size", [1, 2])
@pytest.mark.parametrize("nodes", [Nodes(2, 2), Nodes(3, 2), Nodes(2, 4), Nodes(2, 1)], ids=str)
def test_rows_of_hops_are_those_of_each_tokens_journey(nodes, expert_tp_size):
    generator = torch.Generator().manual_seed(nodes.num_nodes + expert_tp_size)
    size, experts_per_rank, topk = nodes.num_nodes * nodes.ranks_per_node, 2, 3
    choices, by_expert_tp_rank = [], []
    for _ in range(expert_tp_size):
        chosen = torch.rand(size, 9, size * experts_per_rank, generator=generator).topk(topk).indices
        choices.append(chosen.tolist())
        maps = torch.zeros(size, 9, size * experts_per_rank).scatter(2, chosen, 1).bool()
        maps[0, 0] = False  # a dropped token
        choices[-1][0][0] = []
        by_expert_tp_rank.append({rank: RoutedRows.of(its, experts_per_rank, nodes) for rank, its in enumerate(maps)})
    assert hop_rows(by_expert_tp_rank, nodes) == journeys(choices, nodes, experts_per_rank)


def test_routing_of_cut_experts_counts_rows_of_all_tp_ranks():
    """Two groups share the parts of the same experts, two other groups others."""
    nodes, rows = Nodes(2, 1), RoutedRows((5, 4), (3, 2), (3, 2))
    more = RoutedRows((9, 9), (7, 6), (7, 6))
    ranks = [
        RankRouting(group, place, {}, {FIRST: its}, holders)
        for group, holders, its in ((0, 0, rows), (1, 0, more), (4, 4, rows), (5, 4, rows))
        for place in (0, 1)
    ]
    (chunk,) = chunk_routing(ranks, 2, nodes)
    # Each rank gets its own tokens and its peer's, and passes them on to the other holder; whose tokens are more.
    assert chunk.hops == HopRows((2, 3), (3, 2), (2 * 6 - 6, 2 * 4 - 4), (14, 12))
    assert chunk_routing(ranks, 2)[0].hops is None
