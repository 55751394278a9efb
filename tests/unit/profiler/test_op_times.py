"""Profiles from timelines whose figures are known."""

import dataclasses

import pytest

from megatron_lancet.planning.measured.op_times import Samples, op_key, op_times, over_ranks, weight_grad_times
from megatron_lancet.schedule.dispatch import PLAIN, Dispatch
from megatron_lancet.schedule.layers import LayerKind
from megatron_lancet.schedule.ops import Op, Phase
from megatron_lancet.schedule.plan import ChunkDim, OverlapRange, fixed_plan
from megatron_lancet.schedule.timeline import Lane, RankTimeline, Span
from tests.unit.profiler.synthetic import FACTS, step

WHOLE, HALVES = fixed_plan(1), fixed_plan(2)


def figures(*slownesses: float):
    samples = Samples()
    for plan in (WHOLE, HALVES):
        for slowness in slownesses:
            samples.add(step(plan, slowness), plan, FACTS)
    return samples.medians()


@pytest.fixture(scope="module")
def ops():
    found = op_times(figures(1.0, 1.0, 9.0), FACTS)
    return {(op.layer_kind, op.kind, op.phase, op.num_chunks, op.chunk): op for op in found}


def test_op_times_are_medians_of_steps_layers_micro_batches(ops):
    assert ops[LayerKind.DENSE, "mlp", Phase.FORWARD, 1, 0].ms == 1.0
    assert ops[LayerKind.DENSE, "mlp", Phase.FORWARD, 2, 1].ms == pytest.approx(1.1)
    # Two layers: 2 and 3 ms, twice calm, once slow.
    assert ops[LayerKind.MOE, "experts", Phase.FORWARD, 1, 0].ms == 3.0


def test_op_times_sum_parts_between_waits(ops):
    assert ops[LayerKind.DENSE, "mlp", Phase.INPUT_GRAD, 1, 0].ms == 2.0


def test_op_times_have_rows(ops):
    assert ops[LayerKind.MOE, "experts", Phase.FORWARD, 2, 0].rows == 42
    assert ops[LayerKind.MOE, "experts", Phase.INPUT_GRAD, 2, 0].rows == 42
    assert [ops[LayerKind.DENSE, "mlp", Phase.FORWARD, 2, chunk].rows for chunk in (0, 1)] == [20, 10]
    assert ops[LayerKind.NONE, "head", Phase.FORWARD, 1, 0].rows == 30


def test_op_times_outside_layers_count_once(ops):
    assert [key for key in ops if key[0] is LayerKind.NONE] == [(LayerKind.NONE, "head", Phase.FORWARD, 1, 0)]


def test_op_times_have_weight_gradients():
    found = {(dw.name, dw.num_chunks): dw for dw in weight_grad_times(figures(1.0), FACTS)}
    name = "mlp.experts.local_experts.0.linear_fc1"
    assert set(found) == {(name, 1), (name, 2), ("output_layer", 1)}
    expert = found[name, 2]
    assert (expert.ms, expert.rows, expert.pinned_bytes, expert.weight_bytes) == (0.125, 42, 100, 64)
    assert (expert.after, expert.layer_kind) == ("experts", LayerKind.MOE)
    output = found["output_layer", 1]
    assert (output.ms, output.rows, output.after, output.layer_kind) == (0.75, 30, "head", LayerKind.NONE)


def test_op_times_exclude_the_slowdown_by_messages():
    samples = Samples()
    samples.add(step(WHOLE), WHOLE, FACTS)
    key = op_key(Op.parse("L1.c0.F.mlp"), WHOLE, FACTS)
    # 1 ms in each of two micro-batches; a message is in flight for half of it in the first.
    assert samples.medians(lambda kind: 2.0 if kind == "mlp" else 9.0).op_ms[key] == pytest.approx((0.75 + 1) / 2)
    assert samples.medians().op_ms[key] == pytest.approx(1)


def test_messages_that_wait_for_other_ranks_slow_nothing_down():
    """The message is on its way from 2 to 4 ms, and its bytes move in the last 0.2 of them."""

    def beside(message_ms):
        samples = Samples()
        samples.add(step(WHOLE), WHOLE, FACTS, message_ms)
        keys = (op_key(Op.parse(f"L1.c0.{phase}.mlp"), WHOLE, FACTS) for phase in "FI")
        return [sum(sample.overlapped_ms for sample in samples.ops[key]) for key in keys]

    assert beside(None) == pytest.approx([0.5, 1.25])
    assert beside(lambda message: {"L2.c0.F.dispatch": 0.2}[message.name]) == pytest.approx([0.0, 0.2])


@pytest.mark.parametrize("dispatch", Dispatch.known().values())
def test_ops_that_make_or_sum_rows_are_timed_by_dispatch(dispatch):
    plan = fixed_plan(1, dispatch=dispatch)
    kinds = ("attention", "route", "shared_experts", "preprocess", "experts", "node_rows", "node_sums", "postprocess")
    found = {kind: op_key(Op.parse(f"L2.c0.F.{kind}"), plan, FACTS).dispatch for kind in kinds}
    assert {kind for kind in kinds if found[kind] is not PLAIN} == (set() if dispatch is PLAIN else set(kinds[3:]))
    assert set(found.values()) == {PLAIN, dispatch}
    both = Samples()
    both.add(step(WHOLE), WHOLE, FACTS)
    both.add(step(WHOLE, 3.0), plan, FACTS)
    experts = [op for op in op_times(both.medians(), FACTS) if (op.kind, op.phase) == ("experts", "F")]
    expected = {PLAIN: 2.5, dispatch: 7.5} if dispatch is not PLAIN else {PLAIN: 4.5}
    assert {op.dispatch: op.ms for op in experts} == pytest.approx(expected)


def test_parts_of_the_experts_are_timed_apart_with_their_rows():
    """Each part of an op is a sample of it; there are two tiles, and two halves of the rows that stay."""
    plan = fixed_plan(1, tiles=2)
    whole = step(plan)
    parts = ("t0.{}.own_experts", "t0.{}.experts", "t1.{}.experts", "t1.{}.own_experts")
    spans: list[Span] = []
    rows: dict[str, tuple[int, ...]] = {}
    for span in whole.timeline.spans:
        op = Op.parse(span.name)
        is_cut = op.kind == "experts" and span.lane is Lane.COMPUTE
        names = [f"L{op.layer}.c0.{part.format(op.phase)}" for part in parts] if is_cut else [span.name]
        spans += [dataclasses.replace(span, name=name) for name in names]
        rows |= {name: (7 if "own" in name else 14,) * 2 for name in names if is_cut}
    timeline = dataclasses.replace(whole.timeline, spans=tuple(spans))
    samples = Samples()
    samples.add(step(WHOLE), WHOLE, FACTS)
    samples.add(dataclasses.replace(whole, timeline=timeline, received_rows=rows), plan, FACTS)
    medians = samples.medians()
    ops = {(op.kind, op.phase, op.tiles): op for op in op_times(medians, FACTS)}
    assert {key: op.rows for key, op in ops.items() if "experts" in key[0] and key[1] == Phase.FORWARD} == {
        ("experts", "F", 0): 42,
        ("experts", "F", 2): 14,
        ("own_experts", "F", 2): 7,
    }
    assert ops["experts", Phase.FORWARD, 2].ms == ops["own_experts", Phase.FORWARD, 2].ms == pytest.approx(2.5)
    assert ("mlp", "F", 2) not in ops
    assert all(len(times) == 2 * FACTS.num_micro_batches for (_, key), times in samples.steps[1].items() if key.tiles)
    assert {dw.rows for dw in weight_grad_times(medians, FACTS) if dw.after == "experts"} == {42}


def test_rest_time_is_what_no_span_covers():
    assert figures(1.0, 2.0).rest_ms == pytest.approx(5.0)


def test_rest_time_of_a_pipeline_is_outside_of_all_passes():
    """Later stages, and the first one in between, also wait while the pipeline fills and drains."""
    spans = (Span("F.head", Lane.COMPUTE, 2.0, 4.0), Span("L1.c0.F.mlp", Lane.COMPUTE, 7.0, 9.0))
    timeline = RankTimeline(0, spans, 10.0)
    samples = Samples()
    samples.add(dataclasses.replace(step(WHOLE), timeline=timeline), WHOLE, FACTS)
    first = samples.medians()
    assert (first.rest_ms, first.outside_ms) == (6.0, 3.0)
    last = dataclasses.replace(first, rest_ms=8.0, outside_ms=5.0)
    assert over_ranks([last, first], [1, 0]).rest_ms == 3.0
    assert over_ranks([last, first], [0, 0]).rest_ms == 7.0


def test_op_times_merge_layers_of_all_ranks():
    slow, fast = figures(3.0), figures(1.0)
    key = op_key(Op.parse("L1.c0.F.mlp"), WHOLE, FACTS)
    only_here = op_key(Op.parse("L2.c0.F.experts"), WHOLE, FACTS)
    del fast.op_ms[only_here]
    both = over_ranks([slow, fast], [0, 0])
    assert both.op_ms[key] == 2.0
    assert both.op_ms[only_here] == slow.op_ms[only_here]


@pytest.mark.parametrize(
    ("overlap_range", "kind", "num_chunks"),
    [
        (OverlapRange.STACK, "attention", 2),
        (OverlapRange.GATE, "attention", 1),
        (OverlapRange.GATE, "route", 2),
        (OverlapRange.EXPERTS, "route", 1),
        (OverlapRange.EXPERTS, "experts", 2),
    ],
)
def test_op_times_of_narrow_ranges_are_of_whole_ops(overlap_range, kind, num_chunks):
    plan = fixed_plan(2, chunk_dim=ChunkDim.SEQUENCE, overlap_range=overlap_range)
    key = op_key(Op.parse(f"L2.c0.F.{kind}"), plan, FACTS)
    assert (key.num_chunks, key.chunk_dim) == (num_chunks, ChunkDim.SEQUENCE if num_chunks > 1 else ChunkDim.BATCH)
