"""What all-to-alls carry in a planned step."""

import dataclasses
import re

import pytest
from hypothesis import given

from benchmarks.synthetic_profile import Machine, synthetic_profile
from megatron_lancet.features.dedup.order import DEDUP
from megatron_lancet.features.two_hop.order import TWO_HOP
from megatron_lancet.files.reader import RecordError
from megatron_lancet.planning.profile import ChunkRouting
from megatron_lancet.planning.search.planner import make_plan
from megatron_lancet.planning.search.search_space import Limits
from megatron_lancet.planning.simulation.simulator import PlanMismatch, simulate
from megatron_lancet.schedule.dispatch import PLAIN, Dispatch
from megatron_lancet.schedule.ops import OpKind
from megatron_lancet.schedule.plan import ChunkDim, DwPolicy, fixed_plan
from megatron_lancet.schedule.timeline import Lane
from tests.draws import examples
from tests.unit.planning.strategies import EVEN, UNEVEN, machines_and_plans

FEW = Limits(num_chunks=(1, 2), dw_window_layers=(1,))
TOP_4 = Machine(topk=4, shares=(0.25,) * 4, link_ms=20.0)


def test_planner_sends_distinct_rows_where_they_are_fewer():
    profile = synthetic_profile(TOP_4)
    planned = make_plan(profile, FEW)
    plain = make_plan(profile, dataclasses.replace(FEW, dispatches=(PLAIN,)))
    assert {one.plan.dispatch for one in planned.alternatives} == {DEDUP}
    assert {one.plan.dispatch for one in plain.alternatives} == {PLAIN}
    assert [one.what for one in planned.excluded if one not in plain.excluded] == ["dispatch=two-hop", "dispatch=plain"]
    assert planned.prediction.step_ms < 0.95 * plain.prediction.step_ms
    # Without overlap is without distinct rows: stock.
    assert planned.no_overlap == plain.no_overlap == simulate(profile, fixed_plan(1, DwPolicy.NONE)).prediction


@examples(30)
@given(machines_and_plans(topk=2, shares=(EVEN, UNEVEN, (0.5, 0.3, 0.2))))
def test_no_plan_is_slower_for_sending_distinct_rows(machine_and_plan):
    machine, plan = machine_and_plan
    profile = synthetic_profile(machine)
    plain, dedup = (simulate(profile, dataclasses.replace(plan, dispatch=dispatch)) for dispatch in (PLAIN, DEDUP))
    assert dedup.prediction.step_ms <= plain.prediction.step_ms + 1e-6
    for kind in (OpKind.DISPATCH, OpKind.COMBINE):
        assert sent_bytes(dedup, kind) <= sent_bytes(plain, kind)


def sent_bytes(simulation, kind):
    return sum(
        span.num_bytes * num_ranks
        for timeline, num_ranks in zip(simulation.timelines, simulation.same_ranks, strict=True)
        for span in timeline.spans
        if span.lane is Lane.COMM and span.name.endswith(f".{kind}")
    )


def test_planner_stays_plain_where_experts_are_on_other_ranks():
    profile = synthetic_profile(TOP_4)
    routing = ChunkRouting(1, ChunkDim.BATCH, 1, 0, (1536,) * 4, (2048,) * 4, (1530,) * 4, (1530,) * 4)
    planned = make_plan(dataclasses.replace(profile, routing=(routing,)), FEW)
    assert planned.plan.dispatch is PLAIN
    (excluded,) = (one for one in planned.excluded if one.what == "dispatch=dedup")
    assert re.fullmatch(
        r"its messages would have 102 % of the plain ones' bytes; this plan would take [\d.]+ ms with it",
        excluded.reason,
    )
    asked = make_plan(profile, dataclasses.replace(FEW, dispatches=(DEDUP,)))
    assert asked.plan.dispatch is DEDUP


def test_dispatch_that_the_model_cannot_use_is_refused():
    profile = synthetic_profile(Machine())
    with pytest.raises(RecordError, match=r"the limits leave no plan: .*; dispatch=dedup: a token has one expert"):
        make_plan(profile, dataclasses.replace(FEW, dispatches=(DEDUP,)))
    plan = dataclasses.replace(fixed_plan(2), dispatch=DEDUP)
    with pytest.raises(PlanMismatch, match=r"the plan's dispatch is dedup, but a token has one expert .*; use plain"):
        simulate(profile, plan)
    assert make_plan(profile, FEW).plan.dispatch is PLAIN
    top_1 = make_plan(profile, FEW)
    assert [one.what for one in top_1.excluded if one.is_evident] == ["dispatch=dedup", "dispatch=two-hop"]


NODES = dataclasses.replace(TOP_4, num_nodes=2, between_nodes=1.5, inside_node=0.1, chunk_counts=(1, 2))


@pytest.mark.parametrize("max_exhaustive", [0, 300])
def test_two_hops_are_chosen_where_link_between_nodes_is_slow(max_exhaustive):
    profile = synthetic_profile(NODES)
    planned = make_plan(profile, FEW, max_exhaustive)
    assert {one.plan.dispatch for one in planned.alternatives} == {TWO_HOP}
    others = {
        dispatch: make_plan(profile, dataclasses.replace(FEW, dispatches=(dispatch,)), max_exhaustive)
        for dispatch in Dispatch.known().values()
    }
    assert planned.prediction == others[TWO_HOP].prediction
    assert planned.prediction.step_ms < 0.95 * others[DEDUP].prediction.step_ms
    reasons = {one.what: one.reason for one in planned.excluded}
    assert re.fullmatch(
        r"with dedup messages have 80 % of the plain ones' bytes; this plan would take [\d.]+ ms with it",
        reasons["dispatch=plain"],
    )
    slower, faster, same = map(float, re.findall(r"([\d.]+) ms", reasons["dispatch=dedup"]))
    assert faster < slower <= same + 0.05
    assert slower == pytest.approx(others[DEDUP].prediction.step_ms, rel=0.05)


@pytest.mark.parametrize("changes", [{"link_ms": 1.0, "inside_node": 1.0}, {"inside_node": 4.0}])
def test_two_hops_are_not_chosen_where_they_are_hardly_faster(changes):
    """Where messages are short, two ops more cost more than fewer bytes save; or the link inside a node is slow."""
    profile = synthetic_profile(dataclasses.replace(NODES, **changes))
    planned = make_plan(profile, FEW)
    assert planned.plan.dispatch is DEDUP
    (reason,) = (one.reason for one in planned.excluded if one.what == "dispatch=two-hop")
    with_it, without, same = map(float, re.findall(r"([\d.]+) ms", reason))
    assert without < with_it / 0.99
    asked = make_plan(profile, dataclasses.replace(FEW, dispatches=(TWO_HOP,)))
    assert asked.plan.dispatch is TWO_HOP
    assert asked.prediction.step_ms >= 0.99 * planned.prediction.step_ms
    assert same == pytest.approx(asked.prediction.step_ms, rel=0.2)


def test_two_hops_are_excluded_where_their_times_are_unknown():
    profile = synthetic_profile(NODES)
    old = dataclasses.replace(profile, link=dataclasses.replace(profile.link, between_nodes=()))
    planned = make_plan(old, FEW)
    assert planned.plan.dispatch is DEDUP
    (excluded,) = (one for one in planned.excluded if one.what == "dispatch=two-hop")
    assert "profile again" in excluded.reason
    assert not excluded.is_evident
