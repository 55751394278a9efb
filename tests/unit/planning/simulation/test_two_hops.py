"""Two hops in the simulator: bytes, wires and times that were worked out by hand, and what must hold of any machine."""

import dataclasses
from itertools import pairwise

import pytest
from hypothesis import given

from benchmarks.synthetic_profile import Machine, synthetic_profile
from megatron_lancet.planning.profile import ChunkRouting, HopRows, OpTime
from megatron_lancet.planning.simulation.cost_model import CostModel, UnknownCost
from megatron_lancet.planning.simulation.lowering import ISSUE, Lowering
from megatron_lancet.planning.simulation.rows import Loads
from megatron_lancet.planning.simulation.simulator import PlanMismatch, Simulator, simulate
from megatron_lancet.schedule.layers import LayerKind
from megatron_lancet.schedule.ops import BETWEEN_NODES, INSIDE_NODE, Op, OpKind, Phase
from megatron_lancet.schedule.plan import ChunkDim, Dispatch, DwPolicy, Segment, fixed_plan
from megatron_lancet.schedule.reductions import GradientReduction
from megatron_lancet.schedule.timeline import Lane
from tests.draws import examples
from tests.unit.planning.strategies import machines_and_plans

NODES = Machine(layers="m", shares=(0.25,) * 4, num_nodes=2, topk=4)
OPS_MS = {"attention": 1.0, "route": 1.0, "preprocess": 1.0, "experts": 4.0, "postprocess": 1.0}
# Half as much for each hop as for a message with all rows: 4 ms between nodes, 2 ms inside.
BY_HAND = dataclasses.replace(NODES, op_ms=OPS_MS, dw_ms={}, latency_ms=0.0, counts_ms=0.0, overhead_ms=0.0)
BY_HAND = dataclasses.replace(BY_HAND, rest_ms=0.0)


def two_hop(num_chunks, policy=DwPolicy.NONE):
    return fixed_plan(num_chunks, policy, dispatch=Dispatch.TWO_HOP)


def sent(profile, num_chunks=1):
    """Bytes of the messages of the first chunk, forward and backward, by kind."""
    costs = CostModel(profile)
    segment = Segment(1, 1, num_chunks)
    steps = Lowering(costs, Loads.measured(profile)).forward([(1, LayerKind.MOE)], segment, Dispatch.TWO_HOP)
    return {
        action.kind: (action.forward_bytes, action.backward_bytes)
        for code, _, action in steps
        if code == ISSUE and action.chunk == 0
    }


def test_lowered_hops_have_the_bytes_of_their_rows():
    """4 of 8 experts: a token has none on the other node in 1 of 70 cases, and none on a rank in 15 of 70."""
    profile = synthetic_profile(NODES)
    model, tokens = profile.model, 8 * 64
    # A rank passes its own tokens and those of one rank of the other node on to one other rank.
    node, local = round(tokens * 69 / 70), round(2 * tokens * 55 / 70)
    assert (model.node_row_bytes, model.dedup_row_bytes) == (1008 + 32, 1008 + 16)
    assert sent(profile) == {
        "node_dispatch": ((node * 1040,), (node * 1040,)),
        "local_dispatch": ((local * 1024,), (local * 1024,)),
        "local_combine": ((local * 1000,), (local * 1000,)),
        "node_combine": ((node * 1000,), (node * 1000,)),
    }


def test_lowered_hops_have_the_rows_that_were_recorded():
    profile = synthetic_profile(NODES)
    hops = HopRows((400, 410, 420, 430), (431, 421, 411, 401), (700, 710, 720, 730), (711, 701, 731, 721))
    routing = ChunkRouting(1, ChunkDim.BATCH, 1, 0, (1536,) * 4, (2048,) * 4, hops=hops)
    recorded = dataclasses.replace(profile, routing=(routing,))
    found = sent(recorded)
    assert found["node_dispatch"] == tuple(
        tuple(rows * 1040 for rows in of_ranks) for of_ranks in (hops.node_sent, hops.node_received)
    )
    assert found["local_combine"] == tuple(
        tuple(rows * 1000 for rows in of_ranks) for of_ranks in (hops.local_received, hops.local_sent)
    )
    # Chunks that were not recorded have the expected rows in the same proportion.
    expected, tokens = sent(profile, 2)["node_dispatch"][0][0], sum(hops.node_sent) / 4
    assert sent(recorded, 2)["node_dispatch"][0][0] == pytest.approx(expected * tokens / (512 * 69 / 70), rel=0.01)


def by_hand():
    """4 ms for each message between nodes, 2 ms for each inside a node, and 1 ms for each op between them."""
    profile = synthetic_profile(BY_HAND)
    ops = [
        OpTime(LayerKind.MOE, kind, phase, ChunkDim.BATCH, count, chunk, 512 // count, 1.0 / count)
        for kind in (OpKind.NODE_ROWS, OpKind.NODE_SUMS)
        for phase in (Phase.FORWARD, Phase.INPUT_GRAD)
        for count in (1, 2)
        for chunk in range(count)
    ]
    between, inside = (tuple((size, ms) for size in (0, 10**7)) for ms in (4.0, 2.0))
    link = dataclasses.replace(profile.link, between_nodes=between, inside_node=inside)
    return dataclasses.replace(profile, ops=(*profile.ops, *ops), link=link)


def test_timeline_of_one_chunk_in_two_hops_equals_one_by_hand():
    (timeline,) = simulate(by_hand(), two_hop(1)).timelines
    forward = [f"{s.start_ms:g}-{s.end_ms:g} {s.name}" for s in timeline.spans if ".F." in s.name]
    assert [line for line in forward if line not in ("0-1 L1.c0.F.attention", "1-2 L1.c0.F.route")] == [
        "2-3 L1.c0.F.preprocess",
        "3-7 L1.c0.F.node_dispatch",
        "3-7 L1.c0.F.node_dispatch",
        "7-8 L1.c0.F.node_rows",
        "8-10 L1.c0.F.local_dispatch",
        "8-10 L1.c0.F.local_dispatch",
        "10-14 L1.c0.F.experts",
        "14-16 L1.c0.F.local_combine",
        "14-16 L1.c0.F.local_combine",
        "16-17 L1.c0.F.node_sums",
        "17-21 L1.c0.F.node_combine",
        "17-21 L1.c0.F.node_combine",
        "21-22 L1.c0.F.postprocess",
    ]


def on_wire(timeline, kinds):
    return [span for span in timeline.spans if span.lane is Lane.COMM and Op.parse(span.name).kind in kinds]


def test_messages_of_both_wires_are_on_the_way_at_once():
    """Times of a message do not depend on its size here, and compute takes none."""
    profile = by_hand()
    profile = dataclasses.replace(profile, ops=tuple(dataclasses.replace(op, ms=0.0) for op in profile.ops))
    simulation = simulate(profile, two_hop(8))
    (timeline,) = simulation.timelines
    step_ms = simulation.prediction.step_ms
    assert 1.25 * step_ms < 2 * 8 * 2 * (4.0 + 2.0)
    between, inside = on_wire(timeline, BETWEEN_NODES), on_wire(timeline, INSIDE_NODE)
    assert len(between) == len(inside) == 32
    for spans, least_ms in ((between, 4.0), (inside, 2.0)):  # messages of a wire arrive one after the other
        ends_ms = sorted(span.end_ms for span in spans)
        assert all(after - before >= least_ms - 1e-9 for before, after in pairwise(ends_ms))
    both = [(a, b) for a in between for b in inside if a.start_ms < b.end_ms and b.start_ms < a.end_ms]
    assert both


def test_unprofiled_ops_between_hops_cost_as_similar_ones():
    costs = CostModel(synthetic_profile(NODES))
    lowering = Lowering(costs, Loads.of(costs.model, None))
    steps = lowering.forward([(1, LayerKind.MOE)], Segment(1, 1, 1), Dispatch.TWO_HOP)
    ms = {action.kind: action.forward_ms[0] for _, _, action in steps if action.forward_ms}
    # Two ranks of a node, and two nodes' tokens: 4 * 55 / 70 rows a token in place of 4.
    assert ms["node_rows"] == pytest.approx(ms["preprocess"] * 55 / 70)
    assert ms["node_sums"] == pytest.approx(ms["postprocess"] * 55 / 70)


def test_two_hops_need_nodes_and_times_of_both_hops():
    plan = two_hop(2)
    one_node = synthetic_profile(dataclasses.replace(NODES, num_nodes=1))
    with pytest.raises(PlanMismatch, match="dispatch is two-hop, but it is not known which ranks share a node"):
        simulate(one_node, plan)
    profile = synthetic_profile(NODES)
    old = dataclasses.replace(profile, link=dataclasses.replace(profile.link, inside_node=()))
    with pytest.raises(PlanMismatch, match=r"no times of messages between nodes and inside a node; profile again"):
        simulate(old, plan)
    with pytest.raises(UnknownCost, match="profile again"):
        CostModel(old).message_ms(1000, OpKind.LOCAL_COMBINE)


def test_gradient_reductions_share_the_wire_between_nodes_only():
    profile = by_hand()
    link = dataclasses.replace(profile.link, all_reduce=((0, 0.0), (1_000_000, 30.0)))
    grads = synthetic_profile(dataclasses.replace(BY_HAND, dw_ms={"experts": 0.0})).weight_grads
    rules = GradientReduction(dense_ranks=4, expert_ranks=4, bucket_bytes=1_000_000)
    profile = dataclasses.replace(profile, link=link, gradients=rules, weight_grads=grads)
    (timeline,) = simulate(profile, two_hop(1)).timelines
    ms = {span.name: span.ms for span in timeline.spans if span.lane is Lane.COMM and ".I." in span.name}
    # The experts' gradient is complete when the gradients of the dispatch leave: first inside the node.
    assert ms["L1.c0.I.local_dispatch"] == pytest.approx(2.0)
    assert ms["L1.c0.I.node_dispatch"] == pytest.approx(8.0)


@examples(40)
@given(machines_and_plans(topk=3, shares=((0.25,) * 4, (0.4, 0.3, 0.2, 0.1))))
def test_any_machine_and_plan_can_be_simulated_in_two_hops(machine_and_plan):
    machine, plan = machine_and_plan
    profile = synthetic_profile(dataclasses.replace(machine, num_nodes=2, between_nodes=1.5, inside_node=0.3))
    plan = dataclasses.replace(plan, dispatch=Dispatch.TWO_HOP)
    simulation = simulate(profile, plan)
    assert simulation.prediction == Simulator(CostModel(profile)).predict(plan)
    for timeline in simulation.timelines:
        for kinds in (BETWEEN_NODES, INSIDE_NODE):
            spans = on_wire(timeline, kinds)
            num_moe = sum(profile.model.layer_kinds[layer].has_experts for layer in range(len(machine.layers)))
            assert len(spans) <= 4 * machine.num_micro_batches * num_moe * plan.num_chunks
            assert all(span.end_ms >= span.start_ms for span in spans)
