"""Routing from what ranks saw."""

import dataclasses

import pytest
import torch

from megatron_lancet.planning.profile import ChunkRouting
from megatron_lancet.profiler.routing import ChunkKey, RankRouting, chunk_routing, received_shares, rows_of_step
from megatron_lancet.runtime.trace import RoutedRows
from megatron_lancet.schedule.plan import ChunkDim, fixed_plan
from tests.unit.profiler.synthetic import FACTS, step

FIRST, SECOND = ChunkKey(1, ChunkDim.BATCH, 2, 0), ChunkKey(1, ChunkDim.BATCH, 2, 1)


def ranks_of_two_groups() -> list[RankRouting]:
    even = RoutedRows((9, 9), (9, 9))
    return [
        RankRouting(0, 0, {1: 30}, {FIRST: RoutedRows((3, 4), (2, 4)), SECOND: RoutedRows((6, 5), (5, 4))}),
        RankRouting(0, 1, {1: 10}, {FIRST: RoutedRows((6, 7), (5, 6)), SECOND: RoutedRows((5, 7), (3, 6))}),
        RankRouting(2, 0, {1: 20}, {FIRST: even}),
        RankRouting(2, 1, {1: 20}, {FIRST: even}),
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
