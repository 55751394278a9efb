"""Gradient reductions and all-to-alls on one wire: schedules that were worked out by hand, and what must hold."""

import dataclasses

import pytest
from hypothesis import given

from benchmarks.synthetic_profile import Machine, synthetic_profile
from megatron_lancet.planning.profile import profile_from_json
from megatron_lancet.planning.simulation.cost_model import CostModel, UnknownCost
from megatron_lancet.planning.simulation.engine import Engine
from megatron_lancet.planning.simulation.links import Collectives, Network, SerialLinks
from megatron_lancet.planning.simulation.shared_links import SharedLinks
from megatron_lancet.planning.simulation.simulator import Simulator, simulate
from megatron_lancet.planning.stages import split_at_stages
from megatron_lancet.schedule.dw_queue import AT_ONCE
from megatron_lancet.schedule.ops import Phase
from megatron_lancet.schedule.plan import DwPolicy, fixed_plan
from megatron_lancet.schedule.reductions import CommPriority, GradientReduction
from megatron_lancet.schedule.timeline import Lane
from tests.draws import examples
from tests.unit.planning.strategies import machines_and_plans

OPS_MS = {"attention": 4.0, "route": 1.0, "preprocess": 1.0, "experts": 6.0, "postprocess": 1.0, "mlp": 5.0}
BY_HAND = Machine(
    layers="mm",
    op_ms=OPS_MS,
    dw_ms={"attention": 1.0},
    link_ms=4.0,
    latency_ms=0.0,
    counts_ms=0.0,
    overhead_ms=0.0,
    rest_ms=0.0,
    pinned_bytes=1_024_000,
)
BYTES = BY_HAND.pinned_bytes  # of every gradient
EAGER = GradientReduction(dense_ranks=2, bucket_bytes=BYTES)
FIRST = dataclasses.replace(EAGER, priority=CommPriority.ALL_TO_ALL_FIRST, chunk_bytes=BYTES)


def profile_of(machine, gradients, reduce_ms):
    """Gradients take ``reduce_ms`` each."""
    profile = synthetic_profile(machine)
    link = dataclasses.replace(profile.link, all_reduce=((0, 0.0), (BYTES, reduce_ms)))
    return dataclasses.replace(profile, link=link, gradients=gradients)


def on_the_wire(simulation):
    """Messages of the backward pass, with the pass's beginning at 0."""
    start_ms = simulation.prediction.forward_ms
    return [
        f"{span.start_ms - start_ms:g}-{span.end_ms - start_ms:g} {span.name}"
        for span in simulation.timelines[0].spans
        if span.lane is Lane.COMM and ".F." not in span.name
    ]


@pytest.mark.parametrize(
    ("stages", "buckets"),
    [((0,) * 8, [[1] * 9]), ((0,) * 4 + (1,) * 4, [[1] * 4, [5]]), ((0, 0, 1, 1) * 2, [[2, 1, 1], [3, 2]])],
)
def test_buckets_have_a_size_in_the_first_virtual_stage(stages, buckets):
    """A layer has one weight and the last stage another, each as large as a bucket."""
    dw_ms = {"attention": 1.0, "head": 1.0}
    profile = profile_of(dataclasses.replace(BY_HAND, layers="m" * 8, stages=stages, dw_ms=dw_ms), EAGER, 10.0)
    plan = split_at_stages(fixed_plan(1), stages)
    found = [stage.buckets for stage in Simulator(CostModel(profile)).stages(plan)]
    assert [list(one.num_weights) for one in found] == buckets


def test_bucket_and_all_to_all_share_the_link_equally():
    simulation = simulate(profile_of(BY_HAND, EAGER, 10.0), fixed_plan(1, DwPolicy.NONE))
    assert on_the_wire(simulation) == [
        "1-5 L2.c0.I.combine",
        "11-15 L2.c0.I.dispatch",
        # Alone for 1 ms, next to 4 ms of the combine for 8, alone for 5.
        "22-36 reduce.dense.b0",
        "23-31 L1.c0.I.combine",
        "37-41 L1.c0.I.dispatch",
        "48-58 reduce.dense.b1",
    ]
    assert simulation.prediction.gradient_ms == pytest.approx(10)
    assert simulation.prediction.step_ms == pytest.approx(42 + 58)
    assert simulation.prediction.exposed_ms == pytest.approx(32 + 4)


def test_messages_of_one_flow_are_sent_one_after_the_other():
    simulation = simulate(profile_of(BY_HAND, EAGER, 6.0), fixed_plan(2, DwPolicy.NONE))
    assert on_the_wire(simulation) == [
        "0.5-2.5 L2.c1.I.combine",
        "1-4.5 L2.c0.I.combine",
        "5.5-7.5 L2.c1.I.dispatch",
        "8.5-10.5 L2.c0.I.dispatch",
        "12.5-14.5 L1.c1.I.combine",
        # 0.5 ms alone; then half next to 2 ms of each of three messages, the last of them not to its end.
        "16-27.5 reduce.dense.b0",
        "16.5-20.5 L1.c0.I.combine",
        "19.5-24.5 L1.c1.I.dispatch",  # its turn comes at 20.5
        "23.5-28 L1.c0.I.dispatch",
        "31.5-37.5 reduce.dense.b1",
    ]


def test_all_to_alls_have_priority_on_the_link():
    """The bucket is complete at 22; the next place is behind the last combine."""
    simulation = simulate(profile_of(BY_HAND, FIRST, 6.0), fixed_plan(1, DwPolicy.NONE))
    assert on_the_wire(simulation)[2:] == [
        "23-27 L1.c0.I.combine",
        "27-33 reduce.dense.b0",
        "33-37 L1.c0.I.dispatch",
        "44-50 reduce.dense.b1",
    ]
    assert simulation.prediction.exposed_ms == pytest.approx(32)


def test_micro_ops_are_launched_as_many_as_fit_a_place():
    rules = dataclasses.replace(FIRST, bucket_bytes=2 * BYTES, chunk_bytes=BYTES // 2)
    machine = dataclasses.replace(BY_HAND, layers="mmmm")
    simulation = simulate(profile_of(machine, rules, 10.0), fixed_plan(1, DwPolicy.NONE))
    # The bucket of layers 4 and 3 is complete at 44: four micro-ops, one behind each message that follows.
    lines = on_the_wire(simulation)
    assert lines[lines.index("45-49 L2.c0.I.combine") :][1:8] == [
        "49-54 reduce.dense.b0.0",
        "55-59 L2.c0.I.dispatch",
        "59-64 reduce.dense.b0.1",
        "67-71 L1.c0.I.combine",
        "71-76 reduce.dense.b0.2",
        "77-81 L1.c0.I.dispatch",
        "81-86 reduce.dense.b0.3",
    ]


def test_deferred_gradient_is_reduced_a_window_later():
    """Put when two all-to-alls had passed, reported behind the fourth, whatever gap it ran in."""
    simulation = simulate(profile_of(BY_HAND, EAGER, 10.0), fixed_plan(1))
    assert fixed_plan(1).dw_window == 2
    assert on_the_wire(simulation)[3:] == [
        "32-36 L1.c0.I.dispatch",
        "36-46 reduce.dense.b0",
        "43-56 reduce.dense.b1",  # its turn comes at 46
    ]
    assert simulation.prediction.gradient_ms == pytest.approx(13)


def test_gradients_are_reduced_in_the_last_micro_batch_only():
    gradients = profile_of(dataclasses.replace(BY_HAND, num_micro_batches=3), EAGER, 10.0)
    simulation = simulate(gradients, fixed_plan(1, DwPolicy.NONE))
    plain_ms = simulate(dataclasses.replace(gradients, gradients=None), fixed_plan(1, DwPolicy.NONE)).prediction.step_ms
    assert simulation.prediction.step_ms == pytest.approx(plain_ms / 3 * 2 + 100)
    names = [span.name for span in simulation.timelines[0].spans]
    assert names.count("reduce.dense.b0") == 1
    assert names.count("L1.c0.I.postprocess") == 3
    assert names.index("reduce.dense.b0") > 2 * len(names) / 3


def test_expert_gradients_are_reduced_beside_dense_ones():
    machine = dataclasses.replace(BY_HAND, layers="m", dw_ms={"attention": 1.0, "experts": 1.0}, link_ms=0.0)
    rules = dataclasses.replace(EAGER, dense_ranks=4, expert_ranks=2)
    lines = on_the_wire(simulate(profile_of(machine, rules, 9.0), fixed_plan(1, DwPolicy.NONE)))
    # A ring of 4 passes 3/2 of the bytes, one of 2 a half as much: 6 ms. Experts are ready at 8, attention at 15.
    assert lines[-2:] == ["8-14 reduce.expert.b1", "15-24 reduce.dense.b0"]
    scattered = dataclasses.replace(rules, is_scatter=True)
    lines = on_the_wire(simulate(profile_of(machine, scattered, 9.0), fixed_plan(1, DwPolicy.NONE)))
    assert lines[-2:] == ["8-11 reduce.expert.b1", "15-19.5 reduce.dense.b0"]


def test_tied_head_gradient_is_reduced_last():
    machine = dataclasses.replace(BY_HAND, layers="m", dw_ms={"head": 1.0})
    ends = []
    for is_late in (False, True):
        rules = dataclasses.replace(EAGER, has_late_head=is_late)
        ends.append(on_the_wire(simulate(profile_of(machine, rules, 5.0), fixed_plan(1, DwPolicy.NONE))))
    # The head's dW runs from 0 to 1; the pass ends at 22.
    assert "1-10 reduce.dense.b0" in ends[0]
    assert ends[1][-1] == "22-27 reduce.dense.b0"


def test_dispatches_with_own_connections_share_the_link():
    """A dispatch of 2 rows' worth during a combine: with one flow the second waits, with two both slow down."""
    machine = dataclasses.replace(BY_HAND, layers="m", dw_ms={}, link_ms=12.0)
    profile = synthetic_profile(machine)
    one = [f"{s.start_ms:g}-{s.end_ms:g} {s.name}" for s in messages(profile)]
    assert one[:3] == ["3-9 L1.c0.F.dispatch", "6-15 L1.c1.F.dispatch", "12-21 L1.c0.F.combine"]
    apart = dataclasses.replace(profile, link=dataclasses.replace(profile.link, dispatches_apart=True))
    two = [f"{s.start_ms:g}-{s.end_ms:g} {s.name}" for s in messages(apart)]
    # From 12 on 3 ms of the dispatch are left: they take 6. The combine has 3 ms left then, half of them alone.
    assert two[:3] == ["3-9 L1.c0.F.dispatch", "6-18 L1.c1.F.dispatch", "12-21 L1.c0.F.combine"]


def messages(profile):
    (timeline,) = simulate(profile, fixed_plan(2, DwPolicy.NONE)).timelines
    return [span for span in timeline.spans if span.lane is Lane.COMM]


@examples(30)
@given(machines_and_plans())
def test_one_flow_has_the_times_of_an_unshared_link(machine_and_plan):
    machine, plan = machine_and_plan
    # How slow compute is during a message depends on who is asked first, where ranks do things at the same moment.
    machine = dataclasses.replace(machine, stages=(), num_micro_batches=1, compute_slowdown=1.0)
    profile = synthetic_profile(machine)
    simulator = Simulator(CostModel(profile))
    network = Network(machine.counts_ms, machine.sends_share_link, 1.0, simulator.loads.same_ranks)
    plain = SerialLinks if machine.sends_share_link else Collectives
    (stage,) = simulator.stages(plan)
    for phase, steps in ((Phase.FORWARD, stage.forward), (Phase.INPUT_GRAD, stage.backward)):
        results = [
            Engine(links, SerialLinks(network), steps, phase, AT_ONCE, record=False).run(simulator.start_ms())
            for links in (plain(network), SharedLinks(network))
        ]
        assert results[0].end_ms == pytest.approx(results[1].end_ms)
        assert results[0].exposed_ms == pytest.approx(results[1].exposed_ms, abs=1e-6)


@pytest.mark.thorough
@examples(25)
@given(machines_and_plans())
def test_gradients_are_reduced_once_and_make_no_step_faster(machine_and_plan):
    machine, plan = machine_and_plan
    machine = dataclasses.replace(machine, stages=(), compute_slowdown=1.0, pinned_bytes=BYTES)
    of_layer = {"m": ("attention", "experts"), "d": ("attention", "mlp"), "*": ("attention",), "E": ("experts",)}
    of_layer |= {"-": ("mlp",)}
    weights = [op for letter in machine.layers for op in of_layer[letter] if op in machine.dw_ms]
    num_bytes = BYTES * (len(weights) + ("head" in machine.dw_ms))
    for rules in (EAGER, dataclasses.replace(FIRST, bucket_bytes=3 * BYTES, chunk_bytes=2 * BYTES)):
        profile = profile_of(machine, dataclasses.replace(rules, expert_ranks=2), 4.0)
        simulation = simulate(profile, plan)
        assert Simulator(CostModel(profile)).predict(plan) == simulation.prediction
        alone = simulate(dataclasses.replace(profile, gradients=None), plan).prediction
        if plan.dw_policy is DwPolicy.NONE:  # else what fills which gap may change for the better
            assert simulation.prediction.step_ms >= alone.step_ms - 1e-6
        for timeline in simulation.timelines:
            reductions = [span for span in timeline.spans if span.name.startswith("reduce")]
            assert len({span.name for span in reductions}) == len(reductions)
            assert sum(span.num_bytes for span in reductions) == num_bytes


@pytest.mark.parametrize("host_polls", [True, False])
def test_profiles_keep_host_polls_in_json(host_polls):
    profile = synthetic_profile(dataclasses.replace(BY_HAND, host_polls=host_polls))
    assert profile_from_json(profile.to_json(), "new").link.host_polls is host_polls


def test_profiles_keep_gradients_in_json():
    profile = profile_of(BY_HAND, FIRST, 10.0)
    assert profile_from_json(profile.to_json(), "new") == profile


def test_reductions_without_times_are_refused():
    profile = dataclasses.replace(synthetic_profile(BY_HAND), gradients=EAGER)
    with pytest.raises(UnknownCost, match="no all-reduce times"):
        simulate(profile, fixed_plan(1))
