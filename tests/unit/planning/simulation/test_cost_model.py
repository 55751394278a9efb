import dataclasses

import pytest

from benchmarks.synthetic_profile import Machine, synthetic_profile
from megatron_lancet.files.reader import RecordError
from megatron_lancet.planning.simulation.cost_model import CostModel, UnknownCost
from megatron_lancet.planning.simulation.curve import Curve
from megatron_lancet.schedule.dispatch import Dispatch
from megatron_lancet.schedule.layers import LayerKind
from megatron_lancet.schedule.ops import OpKind, Phase
from megatron_lancet.schedule.plan import ChunkDim

BATCH, SEQUENCE = ChunkDim.BATCH, ChunkDim.SEQUENCE
MOE = LayerKind.MOE
TOKENS = 8 * 64


def model_of(**changes):
    return CostModel(synthetic_profile(Machine(**changes)))


@pytest.mark.parametrize(
    ("points", "x", "y"),
    [
        ([(2, 4.0)], 5, 10.0),
        ([(1, 1.0), (3, 2.0)], 2, 1.5),
        ([(1, 1.0), (3, 2.0)], 5, 3.0),
        ([(1, 1.0), (3, 2.0), (3, 4.0)], 3, 3.0),
        ([(10, 1.0), (20, 11.0)], 5, 0.0),
        ([(1, 1.0), (2, 2.0), (4, 10.0)], 6, 18.0),
    ],
)
def test_cost_curves_are_interpolated(points, x, y):
    assert Curve(points).at(x) == pytest.approx(y)


def test_message_cost_has_latency_and_extrapolates_last_slope():
    costs = model_of(link_ms=5.1, latency_ms=0.1)
    full_bytes = TOKENS // 2 * 1000
    assert costs.message_ms(0) == pytest.approx(0.1)
    assert costs.message_ms(full_bytes) == pytest.approx(5.1)
    assert costs.message_ms(10 * full_bytes) == pytest.approx(50.1)
    assert model_of(shares=(1.0,)).message_ms(1000) == 0


def test_op_costs_are_looked_up_by_chunk():
    costs = model_of(dims=(BATCH, SEQUENCE), overhead_ms=0.0)
    ms = [costs.op_ms(MOE, "attention", Phase.FORWARD, SEQUENCE, 2, chunk, TOKENS / 2) for chunk in (0, 1)]
    assert ms == pytest.approx([1.0, 3.0])
    assert costs.op_ms(MOE, "attention", Phase.FORWARD, BATCH, 2, 1, TOKENS / 2) == pytest.approx(2.0)


def test_op_costs_of_unprofiled_chunk_counts_are_interpolated():
    costs = model_of(chunk_counts=(1, 2, 4), overhead_ms=0.2)
    # 2 chunks: 2.2 ms at 256 tokens; 4 chunks: 1.2 ms at 128.
    third = costs.op_ms(MOE, "attention", Phase.FORWARD, BATCH, 3, 0, 192)
    assert third == pytest.approx((2.2 + 1.2) / 2)


def test_late_sequence_chunks_cost_more_between_profiled_counts():
    costs = model_of(dims=(SEQUENCE,), chunk_counts=(1, 2, 4))
    ms = [costs.op_ms(MOE, "attention", Phase.FORWARD, SEQUENCE, 3, chunk, TOKENS / 3) for chunk in range(3)]
    assert ms == sorted(ms)
    assert ms[0] < ms[2]


def test_expert_costs_depend_on_received_rows():
    costs = model_of(overhead_ms=0.0)
    assert costs.op_ms(MOE, "experts", Phase.FORWARD, BATCH, 1, 0, TOKENS * 1.5) == pytest.approx(9.0)
    assert costs.op_ms(MOE, "experts", Phase.FORWARD, BATCH, 2, 0, TOKENS / 4) == pytest.approx(1.5)


def test_weight_gradient_costs_and_pinned_bytes():
    costs = model_of(pinned_bytes=1000)
    (dw,) = costs.weight_grads(MOE, "experts", 2, TOKENS)
    assert (dw.name, dw.ms, dw.pinned_bytes) == ("mlp.experts", pytest.approx(6.0), 1000)
    assert costs.weight_grads(MOE, "route", 2, TOKENS) == ()


def test_memory_of_unprofiled_chunk_counts_is_interpolated():
    costs = model_of(chunk_counts=(1, 2, 4), saved_bytes=1000)
    assert [costs.saved_bytes(MOE, BATCH, k) for k in (1, 2, 3, 4, 8)] == [1000, 1100, 1200, 1300, 1300]
    without = dataclasses.replace(costs.profile, memory=())
    assert CostModel(without).saved_bytes(MOE, BATCH, 2) == 0
    assert not CostModel(without).knows_memory
    dense_only = dataclasses.replace(
        costs.profile, memory=tuple(use for use in costs.profile.memory if use.layer_kind is LayerKind.DENSE)
    )
    with pytest.raises(UnknownCost, match="does not say what a moe layer keeps"):
        CostModel(dense_only).saved_bytes(MOE, BATCH, 2)


def test_cost_model_refuses_what_was_not_profiled():
    costs = model_of()
    with pytest.raises(UnknownCost, match=r"no time of 'mlp' \(moe layer, phase F, chunks along batch\)"):
        costs.op_ms(MOE, "mlp", Phase.FORWARD, BATCH, 1, 0, TOKENS)
    assert issubclass(UnknownCost, RecordError)
    profile = dataclasses.replace(costs.profile, link=dataclasses.replace(costs.profile.link, all_to_all=()))
    with pytest.raises(UnknownCost, match="no all-to-all times"):
        CostModel(profile)


def test_absent_head_costs_nothing():
    assert model_of(op_ms={}).op_ms(LayerKind.NONE, "head", Phase.FORWARD, BATCH, 1, 0, TOKENS) == 0


def test_costs_of_uneven_chunks():
    assert model_of(micro_batch_size=5).chunk_tokens(BATCH, 2, 1) == [3 * 64, 2 * 64]
    assert model_of().chunk_tokens(SEQUENCE, 3, 1) == [22 * 8, 21 * 8, 21 * 8]
    assert model_of().chunk_tokens(SEQUENCE, 3, 4) == [24 * 8, 20 * 8, 20 * 8]


def test_costs_know_which_cuts_keep_a_multiple():
    costs = model_of(micro_batch_size=6)
    assert [costs.can_cut(SEQUENCE, count, 16) for count in (1, 4, 5)] == [True, True, False]
    assert [costs.can_cut(BATCH, count, 4) for count in (1, 2)] == [True, False]  # 6 samples are no multiple of 4


def test_dws_have_order_of_nearest_profiled_chunk_count():
    profile = synthetic_profile(Machine())
    experts = [dw for dw in profile.weight_grads if dw.after == "experts" and dw.num_chunks in (1, 2)]
    orders = {1: ("fc2", "fc1"), 2: ("fc1", "fc2", "only in chunks")}
    ordered = tuple(dataclasses.replace(dw, name=name) for dw in experts for name in orders[dw.num_chunks])
    costs = CostModel(dataclasses.replace(profile, weight_grads=ordered))
    found = {count: [dw.name for dw in costs.weight_grads(MOE, "experts", count, TOKENS)] for count in (1, 2, 4)}
    assert found == {
        1: ["fc2", "fc1", "only in chunks"],
        2: ["fc1", "fc2", "only in chunks"],
        4: ["fc1", "fc2", "only in chunks"],
    }


def with_dispatch(costs, dispatch, factor, kinds, counts=(1,), becomes=None):
    """The same model measured under another dispatch too, in which ops take ``factor`` times as long."""
    profile = costs.profile
    more = tuple(
        dataclasses.replace(op, kind=becomes or op.kind, ms=factor * op.ms, dispatch=dispatch)
        for op in profile.ops
        if op.layer_kind is MOE and op.kind in kinds and op.num_chunks in counts and op.dispatch is PLAIN
    )
    assert more
    return CostModel(dataclasses.replace(profile, ops=profile.ops + more))


def times(costs, kind, dispatch, num_chunks, rows=TOKENS):
    return [
        costs.op_ms(MOE, kind, Phase.FORWARD, BATCH, num_chunks, chunk, rows / num_chunks, dispatch)
        for chunk in range(num_chunks)
    ]


PLAIN, DEDUP, TWO_HOP = Dispatch.known().values()
ROWS_MADE = (OpKind.PREPROCESS, OpKind.EXPERTS, OpKind.POSTPROCESS)


@pytest.mark.parametrize("num_chunks", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ROWS_MADE)
def test_ops_of_another_dispatch_cost_relative_to_plain(kind, num_chunks):
    costs = with_dispatch(model_of(chunk_counts=(1, 2, 4), overhead_ms=0.3), DEDUP, 0.5, ROWS_MADE)
    plain = times(costs, kind, PLAIN, num_chunks)
    assert plain == times(model_of(chunk_counts=(1, 2, 4), overhead_ms=0.3), kind, PLAIN, num_chunks)
    assert times(costs, kind, DEDUP, num_chunks) == pytest.approx([0.5 * ms for ms in plain])
    # Two hops make and sum rows as deduplicated dispatch does, where they were not measured.
    assert times(costs, kind, TWO_HOP, num_chunks) == times(costs, kind, DEDUP, num_chunks)
    both = with_dispatch(costs, TWO_HOP, 0.25, ROWS_MADE)
    assert times(both, kind, TWO_HOP, num_chunks) == pytest.approx([0.25 * ms for ms in plain])


def test_nearest_chunk_count_says_what_a_dispatch_costs():
    costs = with_dispatch(model_of(chunk_counts=(1, 2, 4)), DEDUP, 0.5, ROWS_MADE)
    costs = with_dispatch(costs, DEDUP, 2.0, ROWS_MADE, counts=(4,))
    plain = [sum(times(costs, OpKind.EXPERTS, PLAIN, count)) for count in (1, 2, 3, 4)]
    dedup = [sum(times(costs, OpKind.EXPERTS, DEDUP, count)) for count in (1, 2, 3, 4)]
    assert [d / p for d, p in zip(dedup, plain, strict=True)] == pytest.approx([0.5, 0.5, 2.0, 2.0])


def test_ops_that_no_dispatch_changes_cost_the_same_with_all():
    costs = with_dispatch(model_of(chunk_counts=(1, 2)), DEDUP, 0.5, ROWS_MADE)
    for kind in (OpKind.ATTENTION, OpKind.ROUTE):
        assert times(costs, kind, DEDUP, 2) == times(costs, kind, PLAIN, 2)
    assert costs.profiled_chunk_counts(BATCH) == (1, 2)


def test_ops_between_two_hops_are_cut_like_those_that_move_rows():
    costs = model_of(chunk_counts=(1, 2), overhead_ms=0.2)
    costs = with_dispatch(costs, TWO_HOP, 3.0, (OpKind.PREPROCESS,), becomes=OpKind.NODE_ROWS)
    for count in (1, 2):
        similar = times(costs, OpKind.PREPROCESS, PLAIN, count)
        assert times(costs, OpKind.NODE_ROWS, TWO_HOP, count) == pytest.approx([3 * ms for ms in similar])


def test_memory_of_another_dispatch_is_relative_to_the_plain_one():
    costs = model_of(chunk_counts=(1, 2, 4), saved_bytes=1000)
    (whole,) = (use for use in costs.profile.memory if use.layer_kind is MOE and use.num_chunks == 1)
    less = dataclasses.replace(whole, saved_bytes=whole.saved_bytes // 2, dispatch=DEDUP)
    costs = CostModel(dataclasses.replace(costs.profile, memory=(*costs.profile.memory, less)))
    assert [costs.saved_bytes(MOE, BATCH, k) for k in (1, 2, 4)] == [1000, 1100, 1300]
    assert [costs.saved_bytes(MOE, BATCH, k, DEDUP) for k in (1, 2, 4)] == [500, 550, 650]
    assert costs.saved_bytes(MOE, BATCH, 2, TWO_HOP) == 550
    assert costs.saved_bytes(LayerKind.DENSE, BATCH, 2, DEDUP) == costs.saved_bytes(LayerKind.DENSE, BATCH, 2)
