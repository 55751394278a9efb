"""Properties of every simulated schedule, on random machines and plans."""

import dataclasses
from itertools import pairwise

from hypothesis import given

from benchmarks.synthetic_profile import synthetic_profile
from megatron_lancet.planning.simulation.cost_model import CostModel
from megatron_lancet.planning.simulation.simulator import Simulator, simulate
from megatron_lancet.schedule.timeline import Lane
from tests.draws import examples
from tests.unit.planning.strategies import machines_and_plans

CLOSE_MS = 1e-9


@examples(60)
@given(machines_and_plans())
def test_simulated_schedules_keep_all_dependencies(machine_and_plan):
    machine, plan = machine_and_plan
    profile = synthetic_profile(machine)
    simulation = simulate(profile, plan)
    prediction = simulation.prediction
    assert Simulator(CostModel(profile)).predict(plan) == prediction
    if plan.dw_memory_bytes is not None and machine.pinned_bytes <= plan.dw_memory_bytes:
        assert prediction.peak_dw_bytes <= plan.dw_memory_bytes
    for timeline, waits in zip(simulation.timelines, simulation.waits, strict=True):
        thread = [span for span in timeline.spans if span.lane is not Lane.COMM]
        assert all(before.end_ms <= after.start_ms + CLOSE_MS for before, after in pairwise(thread))
        assert [span.start_ms for span in timeline.spans] == sorted(span.start_ms for span in timeline.spans)
        assert timeline.exposed_ms() <= prediction.exposed_ms + CLOSE_MS
        arrival_ms = {span.name: span.end_ms for span in reversed(timeline.spans) if span.lane is Lane.COMM}
        for wait in waits:
            assert wait.issued_ms <= wait.sent_ms + CLOSE_MS
            assert wait.start_ms <= wait.exposed_from_ms <= wait.end_ms + CLOSE_MS
            assert wait.end_ms >= arrival_ms[wait.name] - CLOSE_MS
        if machine.sends_share_link:
            sent_ms = sorted(wait.sent_ms for wait in waits)
            assert all(before <= after for before, after in pairwise(sent_ms))
    if len(set(machine.stages)) == 1:
        busy_ms = [sum(s.ms for s in t.spans if s.lane is Lane.COMPUTE) for t in simulation.timelines]
        assert prediction.step_ms - machine.rest_ms >= max(busy_ms) - CLOSE_MS
        assert prediction.floor_ms <= prediction.step_ms + CLOSE_MS


@examples(40)
@given(machines_and_plans())
def test_simulated_step_is_no_shorter_than_its_messages(machine_and_plan):
    machine, plan = machine_and_plan
    machine = dataclasses.replace(machine, stages=(), sends_share_link=True)
    profile = synthetic_profile(machine)
    costs = CostModel(profile)
    simulation = simulate(profile, plan)
    for timeline in simulation.timelines:
        link_ms = sum(costs.message_ms(span.num_bytes) for span in timeline.spans if span.lane is Lane.COMM)
        assert simulation.prediction.step_ms - machine.rest_ms >= link_ms - 1e-6


@examples(30)
@given(machines_and_plans())
def test_simulated_ops_run_once(machine_and_plan):
    machine, plan = machine_and_plan
    machine = dataclasses.replace(machine, stages=(), num_micro_batches=1)
    simulation = simulate(synthetic_profile(machine), plan)
    for timeline in simulation.timelines:
        names = [
            s.name for s in timeline.spans if s.lane is Lane.COMPUTE and ".W." not in s.name and "cut" not in s.name
        ]
        names = [name for name in names if not name.startswith("W.")]
        assert len(names) == len(set(names))
        forward = sorted(name.replace(".F.", ".") for name in names if ".F." in name)
        assert forward == sorted(name.replace(".I.", ".") for name in names if ".I." in name)
        dws = [span.name for span in timeline.spans if span.name.endswith("W.mlp.experts")]
        chunks = {layer: plan.segment_of(layer).num_chunks for layer in range(1, len(machine.layers) + 1)}
        expected = sum(chunks[n] for n, letter in enumerate(machine.layers, 1) if letter in "mE")
        assert len(dws) == (expected if "experts" in machine.dw_ms else 0)
