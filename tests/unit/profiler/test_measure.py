"""Which plans are profiled, and how ranks' figures become one."""

import pytest

from megatron_lancet.planning.profile import MemoryUse
from megatron_lancet.profiler.measure import median_memory, num_profile_steps, plans_to_profile
from megatron_lancet.profiler.routing import RankRouting, received_shares
from megatron_lancet.schedule.layers import LayerKind
from megatron_lancet.schedule.plan import ChunkDim, Dispatch, DwPolicy, OverlapRange


def cuts(*args, **kwargs):
    return [(plan.segments[0].chunk_dim, plan.num_chunks) for plan in plans_to_profile(*args, **kwargs)]


def test_profiled_plans_are_whole_and_cut_along_each_dimension():
    batch, sequence = ChunkDim.BATCH, ChunkDim.SEQUENCE
    assert cuts(4, 128) == [(batch, 1), (batch, 2), (batch, 4), (sequence, 2), (sequence, 4)]
    assert cuts(4, 128, [batch]) == [(batch, 1), (batch, 2), (batch, 4)]
    assert cuts(1, 128) == [(batch, 1), (sequence, 2), (sequence, 4)]
    assert cuts(1, 32) == [(batch, 1), (sequence, 2)]  # of 8 tokens nobody makes a chunk


def test_profiled_plans_keep_the_multiple_of_tokens():
    batch, sequence = ChunkDim.BATCH, ChunkDim.SEQUENCE
    assert cuts(4, 96, token_multiple=128) == [(batch, 1), (sequence, 2)]  # 4 samples, or 32 positions of 4 samples
    plans = plans_to_profile(4, 96, token_multiple=128)
    assert [plan.segments[0].chunk_multiple for plan in plans] == [1, 32]
    assert cuts(4, 128, token_multiple=128) == cuts(4, 128)


def test_profiled_plans_time_weight_gradients_separately():
    plans = plans_to_profile(4, 128, overlap_range=OverlapRange.EXPERTS)
    assert {plan.dw_policy for plan in plans} == {DwPolicy.FILL}
    assert {plan.segments[0].range for plan in plans} == {OverlapRange.EXPERTS}
    assert num_profile_steps(plans, 3) == 20


def test_each_allowed_dispatch_is_profiled_with_one_chunk():
    plain = plans_to_profile(4, 128)
    assert {plan.dispatch for plan in plain} == {Dispatch.PLAIN}
    plans = plans_to_profile(4, 128, overlap_range=OverlapRange.GATE, dispatches=tuple(Dispatch))
    others = [plan for plan in plans if plan.dispatch is not Dispatch.PLAIN]
    assert [(plan.dispatch, plan.num_chunks) for plan in others] == [(Dispatch.DEDUP, 1), (Dispatch.TWO_HOP, 1)]
    assert {plan.segments[0].range for plan in others} == {OverlapRange.GATE}
    assert num_profile_steps(plans) == num_profile_steps(plain) + 8
    # The costs of all other ops are the plain dispatch's, also where a plan may not have it.
    with_dedup = plans_to_profile(4, 128, dispatches=(Dispatch.DEDUP,))
    assert [plan for plan in with_dedup if plan.dispatch is Dispatch.PLAIN] == plain
    assert len(with_dedup) == len(plain) + 1


def test_one_more_plan_has_tiles():
    without, plans = (plans_to_profile(4, 128, has_tiles=has_tiles) for has_tiles in (False, True))
    (tiled,) = (plan for plan in plans if plan.has_tiles)
    assert (tiled.num_chunks, tiled.segments[0].tiles, tiled.dw_policy) == (1, 2, DwPolicy.FILL)
    assert [plan for plan in plans if plan != tiled] == without
    assert num_profile_steps(plans) == num_profile_steps(without) + 4


def rank(group, place, received):
    return RankRouting(group, place, received, {}, group)


def test_profiled_shares_are_medians_over_layers_and_groups():
    uneven = [rank(0, 0, {1: 30, 2: 30}), rank(0, 1, {1: 10, 2: 10})]
    assert received_shares(uneven, 2) == pytest.approx((0.75, 0.25))
    other_group = [rank(2, 0, {1: 10, 2: 10}), rank(2, 1, {1: 10, 2: 10})]
    assert received_shares(uneven + other_group, 2) == pytest.approx((0.625, 0.375))


def test_profiled_shares_of_missing_ranks_are_equal():
    assert received_shares([rank(0, 0, {1: 9})] * 4, 4) == (0.25,) * 4


def test_profiled_memory_is_the_median_of_ranks_with_such_layers():
    def use(kind, num_bytes):
        return MemoryUse(kind, ChunkDim.BATCH, 2, num_bytes)

    found = median_memory([[use(LayerKind.MOE, 10)], [use(LayerKind.MOE, 30), use(LayerKind.DENSE, 5)]])
    assert found == (use(LayerKind.MOE, 20), use(LayerKind.DENSE, 5))
