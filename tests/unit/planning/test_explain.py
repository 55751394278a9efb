import dataclasses

import pytest

from benchmarks.synthetic_profile import Machine, synthetic_profile
from megatron_lancet.features.dedup.order import DEDUP
from megatron_lancet.features.two_hop.order import TWO_HOP
from megatron_lancet.lab.plan_text.explanation_text import layer_lines
from megatron_lancet.lab.plan_text.plan_text import description
from megatron_lancet.planning.explain import Filled, Reason, explain
from megatron_lancet.planning.search.planner import make_plan
from megatron_lancet.planning.search.search_space import Exclusion, Limits
from megatron_lancet.planning.simulation.simulator import simulate
from megatron_lancet.schedule.dispatch import PLAIN
from megatron_lancet.schedule.plan import DwPolicy, Gap, LocalTokens, Plan, Segment, fixed_plan

NODES = {"shares": (0.25,) * 4, "num_nodes": 2, "topk": 4, "link_ms": 20.0}


def reasons(machine, plan, planned=None):
    return set(explain(synthetic_profile(machine), plan, planned).exposed_by_reason())


@pytest.mark.parametrize(
    ("changes", "plan", "expected"),
    [
        ({}, fixed_plan(1, DwPolicy.NONE), {Reason.DEPENDENCY, Reason.NO_DW}),
        ({"link_ms": 9.0}, fixed_plan(1), {Reason.DEPENDENCY, Reason.NOTHING_LEFT}),
        ({"link_ms": 80.0}, fixed_plan(2), {Reason.LINK}),
        ({"counts_ms": 9.0, "host_polls": False}, fixed_plan(2), {Reason.COUNTS}),
        (NODES | {"between_nodes": 4.0}, fixed_plan(2, dispatch=TWO_HOP), {Reason.LINK}),
        ({"shares": (0.95, 0.05), "link_ms": 0.2}, fixed_plan(1, DwPolicy.NONE), {Reason.PEER}),
    ],
)
def test_explanation_gives_reasons_of_exposed_time(changes, plan, expected):
    assert reasons(Machine(layers="mm", **changes), plan) >= expected


def test_explanation_gives_memory_as_a_reason():
    machine = Machine(layers="mm", chunk_counts=(1, 2))
    planned = make_plan(synthetic_profile(machine), Limits(max_memory_bytes=20_000_000))
    assert reasons(machine, planned.plan, planned) == {Reason.MEMORY}
    free = make_plan(synthetic_profile(machine))
    assert Reason.MEMORY not in reasons(machine, free.plan, free)
    bounded = dataclasses.replace(fixed_plan(2, dw_memory_bytes=1), dw_window=8)
    assert Reason.MEMORY in reasons(machine, bounded)


def test_explanation_sums_layers_and_names_gaps():
    profile = synthetic_profile(Machine(layers="mdm", link_ms=9.0))
    gap = Gap("L3.c0.I.dispatch", ("L3.W.mlp.experts",))
    plan = dataclasses.replace(fixed_plan(1), gaps=(gap,))
    explanation = explain(profile, plan)
    assert [layer.layer for layer in explanation.layers] == [1, 2, 3]
    assert sum(layer.exposed_ms for layer in explanation.layers) == pytest.approx(explanation.prediction.exposed_ms)
    assert explanation.layers[1].exposed == ()
    last = explanation.layers[2]
    assert Filled(gap.op, ("L3.W.mlp.experts",)) in last.filled
    dispatch = next(message for message in last.exposed if message.op == "L3.c0.F.dispatch")
    assert (dispatch.ms, dispatch.reason) == (pytest.approx(9.0), Reason.DEPENDENCY)


def test_explanation_lists_alternatives_and_exclusions():
    profile = synthetic_profile(Machine(layers="mm"))
    why = Exclusion("range=stack", "the router needs the full micro-batch")
    planned = make_plan(profile, Limits(pairing=(False,), max_memory_bytes=1, excluded=(why,)))
    explanation = explain(profile, planned.plan, planned)
    assert explanation.excluded[0] == why
    assert explanation.no_overlap == planned.no_overlap
    assert explanation.others == planned.alternatives


def test_explanation_names_tiles():
    plan = fixed_plan(1, tiles=2, local_tokens=LocalTokens.AFTER)
    explanation = explain(synthetic_profile(Machine(layers="m", link_ms=9.0)), plan)
    ops = {message.op for message in explanation.layers[0].exposed}
    assert {"L1.c0.t0.F.dispatch", "L1.c0.t1.F.dispatch"} <= ops
    first, *_ = layer_lines(explanation)
    assert "one chunk, rows of other ranks in 2 tiles, a rank's own behind them; exposed" in first
    assert description(fixed_plan(1, tiles=1).segments[0]) == (
        "the unchunked micro-batch; rows of other ranks in 1 tile, half of a rank's own before them and half behind"
    )


def test_explanation_covers_every_stage():
    machine = Machine(layers="mmm", stages=(0, 0, 1), num_micro_batches=4)
    plan = Plan((Segment(1, 2, 1), Segment(3, None, 2)), DwPolicy.NONE)
    explanation = explain(synthetic_profile(machine), plan)
    assert [(layer.layer, layer.stage, layer.segment.num_chunks) for layer in explanation.layers] == [
        (1, 0, 1),
        (2, 0, 1),
        (3, 1, 2),
    ]
    assert all(layer.exposed for layer in explanation.layers)


def test_explanation_compares_every_dispatch_that_is_possible():
    profile = synthetic_profile(Machine(layers="mm", **NODES))
    plan = fixed_plan(2, dispatch=DEDUP)
    explanation = explain(profile, plan)
    assert explanation.other_dispatches_ms == {
        dispatch: pytest.approx(simulate(profile, fixed_plan(2, dispatch=dispatch)).prediction.step_ms)
        for dispatch in (PLAIN, TWO_HOP)
    }
    assert explain(synthetic_profile(Machine(layers="mm")), fixed_plan(2)).other_dispatches_ms == {}
