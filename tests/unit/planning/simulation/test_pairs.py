"""Paired steps: their order, their time where it is known, and what the planner makes of them."""

import dataclasses
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.synthetic_profile import Machine, synthetic_profile
from megatron_lancet.planning.plan_record import record_of
from megatron_lancet.planning.simulation.cost_model import CostModel
from megatron_lancet.planning.simulation.lowering import BESIDE, EndBackward
from megatron_lancet.planning.simulation.pairs import Passes, paired_steps
from megatron_lancet.planning.simulation.simulator import MAX_PLAYED_WITH_ENDS, Simulator, simulate
from megatron_lancet.schedule.ops import Launch, Op, Phase, Wait
from megatron_lancet.schedule.pairing import PairedTurns
from megatron_lancet.schedule.plan import DwPolicy, Gap, fixed_plan, paired
from megatron_lancet.schedule.timeline import Lane
from tests.draws import examples
from tests.unit.planning.strategies import machines

NONE, FILL = DwPolicy.NONE, DwPolicy.FILL
BALANCED = {"attention": 2.0, "route": 0.0, "preprocess": 0.0, "experts": 2.0, "postprocess": 0.0}
"""A forward turn is as long as what a backward does between two waits."""


def step_ms(machine, plan, num_micro_batches):
    machine = dataclasses.replace(machine, num_micro_batches=num_micro_batches, rest_ms=0.0)
    return simulate(synthetic_profile(machine), plan).prediction.step_ms


def simple(**changed):
    settled = {"latency_ms": 0.0, "counts_ms": 0.0, "overhead_ms": 0.0, "dw_ms": {}, "op_ms": BALANCED}
    return Machine(**{"layers": "mmm", "link_ms": 2.0, **settled, **changed})


@pytest.mark.parametrize("num_micro_batches", [1, 2, 3, 4, 7, 20])
def test_free_link_hides_nothing_and_costs_nothing(num_micro_batches):
    machine = simple(link_ms=0.0)
    plan = paired(fixed_plan(1, NONE))
    assert step_ms(machine, plan, num_micro_batches) == pytest.approx(num_micro_batches * 3 * 8.0)


@pytest.mark.parametrize("link_ms", [0.5, 1.0, 1.5, 2.0])
def test_messages_shorter_than_a_turn_are_hidden_in_pairs(link_ms):
    """One more micro-batch adds its compute only, since each message has a turn of the other pass next to it."""
    machine = simple(link_ms=link_ms)
    plan = paired(fixed_plan(1, NONE))
    times_ms = [step_ms(machine, plan, number) for number in range(4, 9)]
    for fewer, more in pairwise(times_ms):
        assert more - fewer == pytest.approx(3 * 8.0)
    assert step_ms(machine, fixed_plan(1, NONE), 2) / 2 == pytest.approx(3 * (8.0 + 4 * link_ms))


def test_long_messages_make_the_link_the_bound():
    """In the steady state the link never rests."""
    machine = simple(link_ms=30.0)
    times_ms = [step_ms(machine, paired(fixed_plan(1, NONE)), number) for number in (7, 8)]
    assert times_ms[1] - times_ms[0] == pytest.approx(3 * 4 * 30.0)


@examples(60)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(2, 5))
def test_order_is_that_of_paired_turns(num_layers, k_middle, k_ends, num_micro_batches):
    simulator = Simulator(CostModel(synthetic_profile(Machine(layers="m" * num_layers))))
    middle, ends = (simulator.stages(fixed_plan(k, NONE))[0] for k in (k_middle, k_ends))
    stages = [ends, *[middle] * (num_micro_batches - 2), ends]
    steps = paired_steps([Passes(stage.forward, stage.backward) for stage in stages])
    ended, place, launched = 0, 0, {0: 0}
    for verb, step_place, _ in steps:
        is_forward, micro_batch = bool(step_place & BESIDE), step_place // (2 * BESIDE)
        if verb is EndBackward:
            assert launched.get(ended + 1) == 2 * num_layers * (k_ends if ended + 2 == num_micro_batches else k_middle)
            ended, place = ended + 1, 0
        elif verb is Launch and is_forward:
            assert micro_batch in (ended + 1, ended + 2)
            launched[micro_batch] = launched.get(micro_batch, 0) + 1
        elif verb is Wait and not is_forward:
            assert micro_batch == ended
            place += 1
            of_middle, of_ends = 2 * num_layers * k_middle, 2 * num_layers * k_ends
            num_waits = of_ends if ended == 0 else of_middle
            num_forward = of_ends if ended + 2 == num_micro_batches else of_middle
            order = PairedTurns(num_forward, num_waits)
            # The first turn launches the first message of each chunk, any other one a message, if there is one left.
            k_forward = k_ends if ended + 2 == num_micro_batches else k_middle
            assert launched[ended + 1] == min(order.done_by(place) + k_forward - 1, num_forward)
            k_next = k_ends if ended + 3 == num_micro_batches else k_middle
            carried = order.begins_next(place) and ended + 2 < num_micro_batches
            assert launched.get(ended + 2, 0) == (k_next if carried else 0)
    assert ended == num_micro_batches - 1
    keys = [(place, action.slot) for verb, place, action in steps if verb is Launch]
    assert len(keys) == len(set(keys))


@examples(40)
@given(machines(), st.integers(1, 2), st.integers(1, 2), st.sampled_from(list(DwPolicy)), st.integers(1, 9))
def test_timeline_is_the_whole_step(machine, k_middle, k_ends, policy, num_micro_batches):
    """Also beyond the pairs that are played: every op is there as often as there are micro-batches."""
    machine = dataclasses.replace(machine, num_micro_batches=num_micro_batches, stages=())
    profile = synthetic_profile(machine)
    plan = paired(fixed_plan(k_middle, policy), fixed_plan(k_ends, policy))
    simulation = simulate(profile, plan)
    assert Simulator(CostModel(profile)).predict(plan) == simulation.prediction
    exposed_ms = [timeline.exposed_ms() for timeline in simulation.timelines]
    assert max(exposed_ms) == pytest.approx(simulation.prediction.exposed_ms, abs=1e-6)
    layer = 1 + next(index for index, letter in enumerate(machine.layers) if letter in "mE")
    for timeline in simulation.timelines:
        names = [span.name for span in timeline.spans if span.lane is Lane.COMM]
        for phase in (Phase.FORWARD, Phase.INPUT_GRAD):
            assert names.count(str(Op(layer, 0, phase, "dispatch"))) == num_micro_batches
        assert [span.start_ms for span in timeline.spans] == sorted(span.start_ms for span in timeline.spans)
        assert max(span.end_ms for span in timeline.spans) <= simulation.prediction.step_ms + 1e-6


@examples(40)
@given(machines(), st.integers(1, 3), st.sampled_from(list(DwPolicy)))
def test_pairs_that_are_not_played_are_like_those_that_are(machine, num_more, policy):
    """Of ranks that are alike; others drift apart for a while."""
    machine = dataclasses.replace(machine, shares=(0.5, 0.5), stages=())
    plan = paired(fixed_plan(1, policy), fixed_plan(2, policy))
    few, more = (
        simulate(synthetic_profile(dataclasses.replace(machine, num_micro_batches=number)), plan).prediction
        for number in (MAX_PLAYED_WITH_ENDS, MAX_PLAYED_WITH_ENDS + num_more)
    )
    assert more.step_ms - few.step_ms == pytest.approx(num_more * few.slot_ms)


def test_waits_of_a_pair_are_of_both_passes():
    profile = synthetic_profile(Machine(layers="mm", num_micro_batches=4, link_ms=20.0))
    simulation = simulate(profile, paired(fixed_plan(1, FILL)))
    ops = list(product((1, 2), ("dispatch", "combine"), (Phase.FORWARD, Phase.INPUT_GRAD)))
    for waits in (*simulation.waits, *simulation.end_waits):
        assert sorted(wait.name for wait in waits) == sorted(str(Op(n, 0, phase, kind)) for n, kind, phase in ops)
    assert any(wait.filled for wait in simulation.waits[0] if Op.parse(wait.name).phase is Phase.FORWARD)


def test_one_micro_batch_runs_by_the_settings_of_the_ends():
    profile = synthetic_profile(Machine(layers="mm", num_micro_batches=1))
    middle, ends = fixed_plan(1, FILL), fixed_plan(2, FILL)
    of_pair, alone = (simulate(profile, plan).prediction for plan in (paired(middle, ends), ends))
    assert of_pair == alone


@pytest.mark.parametrize("num_micro_batches", [2, 4, 9])
def test_plan_file_has_the_exposed_time_of_all_micro_batches(num_micro_batches):
    machine = Machine(layers="mm", num_micro_batches=num_micro_batches, link_ms=20.0)
    record = record_of(synthetic_profile(machine), paired(fixed_plan(1, FILL), fixed_plan(2, FILL)))
    assert sum(layer.exposed_ms for layer in record.prediction.layers) == pytest.approx(record.prediction.exposed_ms)


def test_pairing_keeps_one_layer_more():
    machine = Machine(layers="mmmm", num_micro_batches=4)
    plan = fixed_plan(1, NONE)
    alone, of_pairs = (simulate(synthetic_profile(machine), one).prediction.peak_bytes for one in (plan, paired(plan)))
    beside = alone - 4 * machine.saved_bytes
    assert of_pairs == alone + machine.saved_bytes + beside


def test_without_polling_only_planned_dws_run_in_forward_waits():
    profile = synthetic_profile(
        Machine(layers="mm", num_micro_batches=4, sends_share_link=False, host_polls=False, link_ms=8.0)
    )
    plan = paired(fixed_plan(1, FILL))
    for waits in simulate(profile, plan).waits:
        assert not any(wait.filled for wait in waits if Op.parse(wait.name).phase is Phase.FORWARD)
    gap = dataclasses.replace(plan, gaps=(Gap("L1.c0.F.combine", ("L2.W.mlp.experts",)),))
    filled = {wait.name: wait.filled for wait in simulate(profile, gap).waits[0]}
    assert filled["L1.c0.F.combine"] == ("L2.W.mlp.experts",)
