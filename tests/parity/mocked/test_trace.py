"""What a trace shows of real steps in a mocked world of 4 ranks: one dense layer, two of experts, 2 micro-batches."""

import itertools
import statistics

import pytest

from megatron_lancet.features.two_hop.order import TWO_HOP
from megatron_lancet.planning.measured.op_times import op_key
from megatron_lancet.planning.profile import read_profile
from megatron_lancet.schedule.dispatch import PLAIN
from megatron_lancet.schedule.layers import LayerKind
from megatron_lancet.schedule.ops import Op, Phase
from megatron_lancet.schedule.plan import ChunkDim
from tests.parity.gradients.gradients_worker import MICRO_BATCH, SEQ_LENGTH
from tests.parity.mocked.trace_worker import NODES, PLANS, all_results
from tests.ranks import launch
from tests.unit.profiler.synthetic import FACTS

pytestmark = pytest.mark.alone(setup=True)

NAMES = [*PLANS, "recomputed"]
MOE = ("attention", "route", "preprocess", "shared_experts", "experts", "postprocess")
DENSE = ("attention", "mlp")
MESSAGES = {"F": ("counts", "dispatch", "combine"), "I": ("dispatch", "combine")}
ROUTED_ROWS = MICRO_BATCH * SEQ_LENGTH * 2
FLOAT_BYTES, HIDDEN, HEAD_BYTES = 4, 32, 16


results = launch.result(all_results, joins=False)


@pytest.fixture(params=NAMES)
def name(request):
    return request.param


@pytest.fixture
def found(results, name):
    return results[name]


def plan_of(name):
    return PLANS.get(name, PLANS["batch"])


def spans_in(found, *lanes):
    return [span for span in found["spans"] if span["lane"] in lanes]


def chunks_of(name, layer, kind):
    # The made-up facts have the same kinds of layers.
    return range(op_key(Op.parse(f"L{layer}.c0.F.{kind}"), plan_of(name), FACTS).num_chunks)


def test_trace_changes_no_loss_or_gradient(found):
    plain, traced, again = found["losses"]
    assert plain == traced == again
    assert found["gradients_equal"]
    assert found["recorded_when_off"] == 0


def test_spans_of_the_computing_thread_do_not_overlap(found):
    own = spans_in(found, "compute", "wait")
    assert all(span["start_ms"] <= span["end_ms"] for span in own)
    assert all(before["end_ms"] <= after["start_ms"] + 1e-9 for before, after in itertools.pairwise(own))


def test_spans_cover_the_step_but_for_batches_and_losses(found, name):
    """Each op starts at the end of the previous op, except the first op after a new batch or a loss.

    The test checks no share of the step: the times of batch and loss depend on the machine.
    """
    own = spans_in(found, "compute", "wait")
    assert own[0]["name"] == "F.embedding"
    assert own[-1]["name"] == "I.embedding"
    assert own[0]["start_ms"] >= 0
    assert own[-1]["end_ms"] <= found["step_ms"]
    apart = [
        (before["name"], after["name"])
        for before, after in itertools.pairwise(own)
        if after["start_ms"] - before["end_ms"] > 1e-9
    ]
    # The thread of a forward without a concurrent backward hands over to itself.
    hands_over = plan_of(name).is_paired
    assert [
        (before, after)
        for before, after in apart
        if before not in ("F.head", "I.embedding")
        and after not in ("F.embedding", "I.head")
        and not (hands_over and before == after)
    ] == []


def test_trace_has_every_op_of_every_chunk_and_no_other(found, name):
    layers = {1: DENSE, 2: MOE, 3: MOE}
    expected = {
        f"L{layer}.c{chunk}.{phase}.{kind}"
        for layer, kinds in layers.items()
        for kind in kinds
        for chunk in chunks_of(name, layer, kind)
        for phase in "FI"
    }
    beside = ("embedding", "head", *(["cut"] if plan_of(name).num_chunks > 1 else []))
    expected |= {f"{phase}.{kind}" for phase in "FI" for kind in beside}
    ops = {span["name"] for span in spans_in(found, "compute") if ".W." not in f".{span['name']}"}
    assert ops == expected


def test_uninterrupted_op_has_one_span_per_micro_batch(results):
    spans = [span["name"] for span in spans_in(results["one-chunk"], "compute")]
    num_micro_batches = results["one-chunk"]["num_micro_batches"]
    for layer, kinds in {1: DENSE, 2: MOE, 3: MOE}.items():
        for kind in set(kinds) - {"postprocess", "preprocess", "experts"}:
            assert spans.count(f"L{layer}.c0.F.{kind}") == num_micro_batches


def test_forward_ops_are_in_the_order_of_the_layer(results):
    names = [span["name"] for span in spans_in(results["one-chunk"], "compute")]
    first = [names.index(f"L2.c0.F.{kind}") for kind in MOE]
    assert first == sorted(first)
    backward = [
        names.index(f"L2.c0.I.{kind}") for kind in ("postprocess", "experts", "preprocess", "route", "attention")
    ]
    assert backward == sorted(backward)


def test_weight_gradients_run_once_per_chunk_and_micro_batch(found, name):
    num_micro_batches = found["num_micro_batches"]
    names = [span["name"] for span in spans_in(found, "compute") if ".W." in f".{span['name']}"]
    linears = {
        "attention": ("self_attention.linear_qkv", "self_attention.linear_proj"),
        "mlp": ("mlp.linear_fc1", "mlp.linear_fc2"),
        "shared_experts": ("mlp.shared_experts.linear_fc1", "mlp.shared_experts.linear_fc2"),
        "experts": ("mlp.experts.local_experts.0.linear_fc1", "mlp.experts.local_experts.0.linear_fc2"),
    }
    for layer, kinds in {1: DENSE, 2: MOE, 3: MOE}.items():
        for kind in set(kinds) & set(linears):
            for linear in linears[kind]:
                expected = num_micro_batches * len(chunks_of(name, layer, kind))
                assert names.count(f"L{layer}.W.{linear}") == expected, linear
                facts = found["weight_grads"][f"L{layer}.W.{linear}"]
                assert len(facts["pinned_bytes"]) == expected
                assert min(facts["pinned_bytes"]) > 0
    assert names.count("W.output_layer") == num_micro_batches


def test_trace_has_the_messages_of_every_all_to_all(found, name):
    num_micro_batches = found["num_micro_batches"]
    messages = spans_in(found, "comm")
    names = [span["name"] for span in messages]
    for layer in (2, 3):
        for chunk in chunks_of(name, layer, "experts"):
            for phase, kinds in MESSAGES.items():
                for kind in kinds:
                    assert names.count(f"L{layer}.c{chunk}.{phase}.{kind}") == num_micro_batches
    assert len(names) == 2 * 5 * num_micro_batches * len(chunks_of(name, 2, "experts"))
    assert all(0 <= span["start_ms"] < span["end_ms"] <= found["step_ms"] for span in messages)
    # The link's latency alone is 0.3 ms; of a single message, a pause of the process right after it left may hide some.
    assert statistics.median(span["end_ms"] - span["start_ms"] for span in messages) >= 0.25
    waits = {span["name"] for span in spans_in(found, "wait")}
    assert waits <= set(names)


def test_every_message_is_waited_for_once(found):
    """In the trace as in the counters, whose waits are inside those of the trace."""
    waits = [span for span in spans_in(found, "wait") if not span["name"].endswith(".counts")]
    rows_ms = sum(span["end_ms"] - span["start_ms"] for span in waits)
    messages = [span for span in spans_in(found, "comm") if not span["name"].endswith(".counts")]
    assert sorted(span["name"] for span in waits) == sorted(span["name"] for span in messages)
    assert len(waits) == found["counted"]["num_all_to_alls"]
    assert 0 < found["counted"]["exposed_ms"] <= rows_ms


def test_messages_of_both_passes_are_in_flight_together(results):
    def num_beside(found):
        messages = [
            (Op.parse(span["name"]).phase, span["start_ms"], span["end_ms"]) for span in spans_in(found, "comm")
        ]
        forward, backward = ([m for m in messages if m[0] is phase] for phase in (Phase.FORWARD, Phase.INPUT_GRAD))
        return sum(any(b[1] < f[2] and f[1] < b[2] for b in backward) for f in forward)

    assert num_beside(results["one-chunk"]) == 0
    assert num_beside(results["paired"]) > 0


def test_message_bytes_equal_bytes_of_their_rows(found):
    sent = dict.fromkeys(("F.dispatch", "F.combine", "I.dispatch", "I.combine"), 0)
    for span in spans_in(found, "comm"):
        kind = span["name"].split(".", 2)[2]
        if kind in sent:
            sent[kind] += span["num_bytes"]
    token = HIDDEN * FLOAT_BYTES
    assert sent["F.combine"] == sent["I.combine"] > 0
    assert sent["F.dispatch"] == sent["I.dispatch"] == sent["F.combine"] * (token + HEAD_BYTES) // token


def test_trace_has_received_rows_of_each_chunk(found):
    num_micro_batches = found["num_micro_batches"]
    totals: dict[str, int] = {}
    for op, rows in found["received_rows"].items():
        assert len(rows) == num_micro_batches
        layer = op.partition(".")[0]
        totals[layer] = totals.get(layer, 0) + sum(rows)
    # What the mocked ranks send is what this one sends to them.
    assert totals == {"L2": ROUTED_ROWS * num_micro_batches, "L3": ROUTED_ROWS * num_micro_batches}


@pytest.fixture(scope="module")
def profile(results, tmp_path_factory):
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    path.write_text(results["profile"])
    return read_profile(path)


def test_profile_has_every_op_of_every_profiled_cut(profile):
    plain = [op for op in profile.ops if op.dispatch is PLAIN]
    found = {(op.layer_kind, op.kind, op.phase, op.chunk_dim, op.num_chunks, op.chunk) for op in plain}
    cuts = [(ChunkDim.BATCH, 1, 0)] + [(dim, 2, chunk) for dim in ChunkDim for chunk in (0, 1)]
    kinds = [(LayerKind.MOE, kind) for kind in MOE] + [(LayerKind.DENSE, kind) for kind in DENSE]
    phases = (Phase.FORWARD, Phase.INPUT_GRAD)
    expected = {(*kind, phase, *cut) for kind in kinds for phase in phases for cut in cuts}
    assert expected == {op for op in found if op[0] is not LayerKind.NONE}
    assert {(op[1], op[4]) for op in found if op[0] is LayerKind.NONE} == {("embedding", 1), ("head", 1), ("cut", 2)}
    assert all(op.ms > 0 and op.rows > 0 for op in profile.ops)
    in_two_hops = {(op.layer_kind, op.kind, op.phase, op.num_chunks) for op in profile.ops if op not in plain}
    made_or_summed = ("preprocess", "node_rows", "experts", "node_sums", "postprocess")
    assert in_two_hops == {(LayerKind.MOE, kind, phase, 1) for kind in made_or_summed for phase in phases}


def test_profile_has_messages_memory_and_time_outside_ops(profile):
    assert profile.model.row_bytes == HIDDEN * FLOAT_BYTES + HEAD_BYTES
    assert profile.link.all_to_all[0][0] <= 1024
    assert profile.link.all_to_all[0][1] >= 0.3
    assert profile.link.all_to_all == tuple(sorted(profile.link.all_to_all))
    assert profile.link.counts_ms >= 0.3
    assert profile.link.compute_slowdown >= 1
    in_two_hops = (LayerKind.MOE, ChunkDim.BATCH, 1, TWO_HOP)
    assert {(use.layer_kind, use.chunk_dim, use.num_chunks, use.dispatch) for use in profile.memory} == {
        (kind, dim, count, PLAIN)
        for kind in (LayerKind.MOE, LayerKind.DENSE, LayerKind.NONE)
        for dim, count in ((ChunkDim.BATCH, 1), *((d, 2) for d in ChunkDim))
    } | {in_two_hops}
    tokens_bytes = MICRO_BATCH * SEQ_LENGTH * HIDDEN * FLOAT_BYTES
    moe = next(use for use in profile.memory if use.layer_kind is LayerKind.MOE)
    assert 10 * tokens_bytes < moe.saved_bytes < 100 * tokens_bytes
    assert profile.rest_ms > 0
    assert sum(profile.received_share) == pytest.approx(1)
    assert len(profile.measured_steps_ms) == 4


def test_profile_has_curves_of_both_hops(profile, results):
    """Each goes as far as its own largest message, and no shorter than a small one."""
    assert profile.model.nodes == NODES
    link = profile.link
    assert max(size for size, _ in link.between_nodes) < max(size for size, _ in link.all_to_all)
    for curve in (link.between_nodes, link.inside_node):
        assert curve == tuple(sorted(curve))
        assert curve[0][0] <= 1024
        assert curve[0][1] >= 0.3
    assert link.between_nodes_queued
    assert link.inside_node_queued
