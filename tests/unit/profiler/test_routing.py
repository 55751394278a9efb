"""Routing from what ranks saw."""

import pytest

from megatron_lancet.planning.profile import ChunkRouting
from megatron_lancet.profiler.routing import ChunkKey, RankRouting, chunk_routing, received_shares
from megatron_lancet.schedule.plan import ChunkDim

FIRST, SECOND = ChunkKey(1, ChunkDim.BATCH, 2, 0), ChunkKey(1, ChunkDim.BATCH, 2, 1)


def ranks_of_two_groups() -> list[RankRouting]:
    return [
        RankRouting(0, 0, {1: 30}, {FIRST: (4, 7), SECOND: (5, 8)}),
        RankRouting(0, 1, {1: 10}, {FIRST: (6, 13), SECOND: (5, 12)}),
        RankRouting(2, 0, {1: 20}, {FIRST: (9, 9)}),
        RankRouting(2, 1, {1: 20}, {FIRST: (9, 9)}),
    ]


def test_received_rows_are_those_of_the_first_complete_group():
    assert chunk_routing(ranks_of_two_groups(), 2) == (
        ChunkRouting(1, ChunkDim.BATCH, 2, 0, (4, 6), (7, 13)),
        ChunkRouting(1, ChunkDim.BATCH, 2, 1, (5, 5), (8, 12)),
    )


def test_received_rows_of_an_incomplete_group_are_unknown():
    assert chunk_routing(ranks_of_two_groups()[:1], 2) == ()
    assert received_shares(ranks_of_two_groups()[:1], 2) == (0.5, 0.5)


def test_routing_shares_are_medians_over_groups():
    assert received_shares(ranks_of_two_groups(), 2) == pytest.approx((0.625, 0.375))
