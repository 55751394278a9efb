"""What a step would take elsewhere: what must stay as it is, and which way things must move."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.synthetic_profile import Machine, synthetic_profile
from megatron_lancet.errors import UsageError
from megatron_lancet.features.dedup.order import DEDUP
from megatron_lancet.features.two_hop.order import TWO_HOP
from megatron_lancet.lab.what_if.forecast import (
    Forecaster,
    NetworkChoice,
    Routing,
    largest_ep_size,
    no_overlap,
    sweep,
    two_chunks,
)
from megatron_lancet.lab.what_if.layout import in_layout, why_not_several_nodes
from megatron_lancet.patching import around
from megatron_lancet.planning.profile import ChunkRouting, HopRows
from megatron_lancet.planning.simulation.cost_model import CostModel
from megatron_lancet.planning.simulation.simulator import Simulator, simulate
from megatron_lancet.planning.stages import split_at_stages
from megatron_lancet.schedule.dispatch import PLAIN, Dispatch
from megatron_lancet.schedule.layers import LayerKind
from megatron_lancet.schedule.nodes import Nodes
from megatron_lancet.schedule.ops import OpKind
from megatron_lancet.schedule.plan import ChunkDim, DwPolicy, Plan, Segment, fixed_plan
from tests.draws import examples

SHARES = (0.3, 0.2, 0.25, 0.25)


def profile_of(machine=None, **changes):
    profile = synthetic_profile(machine or Machine("dmmm", shares=SHARES, num_micro_batches=2))
    return dataclasses.replace(profile, model=dataclasses.replace(profile.model, **{"num_experts": 256, **changes}))


def one_chunk(profile) -> Plan:
    return fixed_plan(1)


def in_order(profile) -> Plan:
    """Without deferred weight gradients the order of ops is fixed, so times can only move one way."""
    return fixed_plan(2, DwPolicy.NONE)


PLANNERS = [no_overlap, one_chunk, two_chunks, in_order]


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("stages", [(), (0, 0, 1, 1)])
def test_forecast_of_the_profiled_layout_equals_the_simulator(planner, stages):
    profile = profile_of(Machine("dmmm", stages=stages, shares=SHARES, num_micro_batches=3), world_size=8)
    forecaster = Forecaster(profile, NetworkChoice())
    layout = forecaster.layout(profile.model.world_size)
    assert in_layout(profile, layout) == profile
    plan = split_at_stages(planner(profile), profile.model.stage_of_layer)
    expected = simulate(profile, plan).prediction
    forecast = forecaster.forecast(layout, planner)
    assert forecast.plan == plan
    facts = profile.model
    num_bytes = facts.micro_batch_size * facts.seq_length * facts.combine_row_bytes
    message_ms = NetworkChoice().cluster(profile, 8).message_ms(num_bytes, 4)
    assert forecast.step_ms == pytest.approx(expected.step_ms + (2 * message_ms if stages else 0.0))
    assert forecast.exposed_ms == pytest.approx(expected.exposed_ms)


@pytest.mark.parametrize("planner", PLANNERS)
def test_forecast_without_expert_parallelism_has_no_all_to_all(planner):
    forecaster = Forecaster(profile_of(), NetworkChoice())
    assert forecaster.forecast(forecaster.layout(4, ep_size=1), planner).exposed_ms == 0.0


bandwidths = st.floats(0.01, 1000.0)


@examples(40)
@given(bandwidths, bandwidths, st.sampled_from([2, 8, 64]), st.sampled_from([no_overlap, in_order]))
def test_forecast_with_twice_the_bandwidth_is_never_slower(intra_gbps, inter_gbps, ep_size, planner):
    profile = profile_of()

    def step_ms(intra_factor, inter_factor):
        network = NetworkChoice(4, intra_gbps * intra_factor, 5.0, inter_gbps * inter_factor, 20.0)
        forecaster = Forecaster(profile, network)
        return forecaster.forecast(forecaster.layout(128, ep_size), planner).step_ms

    slow_ms = step_ms(1, 1)
    assert step_ms(2, 1) <= slow_ms * (1 + 1e-9)
    assert step_ms(1, 2) <= slow_ms * (1 + 1e-9)
    assert step_ms(2, 2) <= slow_ms * (1 + 1e-9)


@examples(40)
@given(st.floats(0.0, 2.0), st.floats(0.0, 1.0), st.sampled_from([4, 16]), st.sampled_from([no_overlap, in_order]))
def test_forecast_with_more_skew_is_never_faster(exponent, more, ep_size, planner):
    forecaster = Forecaster(profile_of(), NetworkChoice(8, 1.0, 5.0))

    def step_ms(routing):
        return forecaster.forecast(forecaster.layout(16, ep_size, routing=routing), planner).step_ms

    less_skewed_ms = step_ms(Routing("zipf", exponent))
    assert step_ms(Routing("even")) <= less_skewed_ms * (1 + 1e-9)
    assert less_skewed_ms <= step_ms(Routing("zipf", exponent + more)) * (1 + 1e-9)


def test_forecast_of_thousands_of_ranks_simulates_a_few_of_them():
    """Simulates each plan of each layout once, and ranks with about the same received rows once."""
    simulated: list[int] = []

    def predict(stock, simulator, plan):
        simulated.append(len(set(simulator.costs.profile.received_share)))
        return stock(simulator, plan)

    profile = profile_of(Machine("m" * 96, shares=SHARES))
    forecaster = Forecaster(profile, NetworkChoice(8, 400.0, 5.0, 50.0, 10.0))
    sizes = [4 * 2**power for power in range(11)]
    layouts = [forecaster.layout(size, largest_ep_size(profile.model, size)) for size in sizes]
    with around(Simulator, "predict", predict):
        rows = list(sweep(forecaster, layouts, {"none": no_overlap, "two": two_chunks}))
    assert len(simulated) <= 2 * len(sizes)
    assert 1 < max(simulated) <= 6
    assert [row.layout.world_size for row in rows] == sizes
    assert rows[-1].num_nodes == 512
    assert rows[-1].layout.ep_size == 256
    shares = [row.forecasts["none"].exposed_share for row in rows]
    assert shares[-1] > shares[0]


def test_forecast_of_several_nodes_knows_two_hops():
    profile = profile_of(Machine("mm", shares=SHARES), num_experts=64, topk=4, expert_tp_size=2)
    forecaster = Forecaster(profile, NetworkChoice(8, 80.0, 10.0, 0.8, 50.0))  # 10^7 and 10^5 bytes a ms
    layout = forecaster.layout(32, 16)
    moved = forecaster.moved(layout)
    # 16 ranks with two holders of each expert: 4 nodes of 4 places and 8 ranks.
    assert moved.model.nodes == Nodes(4, 4)
    costs = CostModel(moved)
    assert costs.message_ms(1_000_000, OpKind.NODE_DISPATCH) == pytest.approx(3 * 0.05 + 10.0)
    assert costs.message_ms(1_000_000, OpKind.LOCAL_COMBINE) == pytest.approx(7 * 0.01 + 0.1)
    assert forecaster.dispatches(layout) == tuple(Dispatch.known().values())
    (row,) = sweep(
        forecaster, [layout], {}, lambda dispatch: lambda profile: fixed_plan(1, DwPolicy.NONE, dispatch=dispatch)
    )
    steps_ms = {dispatch: forecast.step_ms for dispatch, forecast in row.by_dispatch.items()}
    assert steps_ms[TWO_HOP] < steps_ms[DEDUP] < steps_ms[PLAIN]
    assert largest_ep_size(profile.model, 8) == 4, "each expert has two holders"
    with pytest.raises(UsageError, match="8 ranks are no multiple of EP size 8 x 2 expert-tensor-parallel ranks"):
        forecaster.layout(8, 8)
    on_one = forecaster.layout(8, 4)
    assert forecaster.moved(on_one).model.nodes is None
    assert forecaster.dispatches(on_one) == (PLAIN, DEDUP)
    assert why_not_several_nodes(profile.model, on_one).endswith("so nothing leaves a node")


def test_forecast_for_other_nodes_forgets_measured_hops():
    machine = Machine("mm", shares=(0.25,) * 4, num_nodes=2, topk=4)
    profile = synthetic_profile(machine)
    op = dataclasses.replace(profile.ops[0], layer_kind=LayerKind.MOE, kind=OpKind.NODE_ROWS)
    hops = HopRows(*((100,) * 4,) * 4)
    routing = ChunkRouting(1, ChunkDim.BATCH, 1, 0, (1536,) * 4, (2048,) * 4, hops=hops)
    profile = dataclasses.replace(profile, ops=(*profile.ops, op), routing=(routing,))
    same = Forecaster(profile, NetworkChoice())
    assert same.moved(same.layout(4)) == profile
    other = Forecaster(profile, NetworkChoice(1, 8.0))
    moved = other.moved(other.layout(4))
    assert moved.ops == profile.ops[:-1]
    assert moved.routing[0].hops is None


def test_forecast_reduces_gradients_by_a_ring():
    profile = profile_of(Machine("mm", shares=SHARES, link_ms=0.2, rest_ms=50.0))
    forecaster = Forecaster(profile, NetworkChoice(4, 8.0, 0.0))  # 10^6 bytes a ms
    here, there = (forecaster.forecast(forecaster.layout(size), no_overlap) for size in (4, 8))
    # Per rank: attention and experts of two layers and the head, 1 MB each. Experts have 1 and 2 replicas.
    assert here.gradient_ms == pytest.approx(2 * 3 / 4 * 3)
    assert there.gradient_ms == pytest.approx(2 * 7 / 8 * 3 + 2 * 1 / 2 * 2)
    assert there.step_ms - here.step_ms == pytest.approx(there.gradient_ms - here.gradient_ms)


def test_forecast_of_a_pipeline_has_fill_and_drain():
    profile = profile_of(Machine("mmmm", shares=SHARES, num_micro_batches=4))
    forecaster = Forecaster(profile, NetworkChoice(64, 1e6, 0.0))
    whole = forecaster.forecast(forecaster.layout(4), no_overlap)
    halves = forecaster.forecast(forecaster.layout(8, pp_size=2), no_overlap)
    assert whole.bubble_ms == 0
    # Head and embedding are on one stage each: a stage's micro-batch takes a little more than half.
    assert halves.step_ms == pytest.approx(whole.step_ms * 5 / 4 / 2, rel=0.1)
    assert halves.bubble_ms == pytest.approx((halves.step_ms - 1.0) / 5, rel=0.02)
    assert [segment.last_layer for segment in halves.plan.segments] == [2, None]


@pytest.mark.parametrize("network", [NetworkChoice(), NetworkChoice(64, 1.0, 5.0)])
def test_forecast_of_each_micro_batch_adds_as_much(network):
    """Also next to the profiled number: messages between stages are in all rows."""
    machine = Machine("mmmm", stages=(0, 0, 1, 1), shares=SHARES, num_micro_batches=3, rest_ms=500.0)
    forecaster = Forecaster(profile_of(machine, world_size=8), network)
    steps = [forecaster.forecast(forecaster.layout(8, num_micro_batches=m), no_overlap).step_ms for m in (2, 3, 4)]
    assert steps[2] - steps[1] == pytest.approx(steps[1] - steps[0])


def test_forecast_segments_end_with_stages():
    plan = Plan((Segment(1, 1, 1), Segment(2, None, 2, ChunkDim.SEQUENCE)), dw_window=4)
    assert [(s.first_layer, s.last_layer, s.num_chunks) for s in split_at_stages(plan, (0, 0, 1, 1, 2)).segments] == [
        (1, 1, 1),
        (2, 2, 2),
        (3, 4, 2),
        (5, None, 2),
    ]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"world_size": 6}, "6 ranks are no multiple of EP size 4"),
        ({"world_size": 3, "ep_size": 3}, "EP size 3 does not divide the 256 experts"),
        ({"world_size": 20, "pp_size": 5}, "5 pipeline stages are more than the 4 layers"),
        ({"world_size": 0}, "at least one rank"),
    ],
)
def test_forecast_refuses_impossible_layouts(sizes, message):
    with pytest.raises(UsageError, match=message):
        Forecaster(profile_of(), NetworkChoice()).layout(**sizes)


def test_forecast_from_a_profile_of_one_rank_needs_a_bandwidth():
    profile = profile_of(Machine("mm", shares=(1.0,)))
    with pytest.raises(UsageError, match="pass --intra-gbps"):
        Forecaster(profile, NetworkChoice()).layout(8, ep_size=8)
    forecaster = Forecaster(profile, NetworkChoice(intra_gbps=100.0))
    assert forecaster.forecast(forecaster.layout(8, ep_size=8), no_overlap).exposed_ms > 0
