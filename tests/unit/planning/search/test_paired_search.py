import dataclasses
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.synthetic_profile import Machine, synthetic_profile
from megatron_lancet.files.reader import RecordError
from megatron_lancet.lab.plan_text.explanation_text import other_pairing_ms
from megatron_lancet.planning.explain import explain
from megatron_lancet.planning.search.planner import make_plan
from megatron_lancet.planning.search.search_space import Limits
from megatron_lancet.planning.simulation.cost_model import CostModel
from megatron_lancet.planning.simulation.simulator import Simulator
from megatron_lancet.planning.stages import split_at_stages
from megatron_lancet.schedule.plan import ChunkDim, DwPolicy, OverlapRange, fixed_plan, paired
from tests.draws import examples
from tests.plan_text import read_plan
from tests.unit.planning.strategies import machines

pytestmark = pytest.mark.slow

CLOSE_MS = 1e-6
ONE_WAY = Limits(num_chunks=(1, 2), ranges=(OverlapRange.STACK,), chunk_dims=(ChunkDim.BATCH,), dw_window_layers=(1,))


@examples(15)
@given(machines(max_layers=2, shares=((0.5, 0.5), (0.7, 0.3))), st.integers(2, 7))
def test_planner_is_never_worse_than_uniform_plans(machine, num_micro_batches):
    profile = synthetic_profile(dataclasses.replace(machine, num_micro_batches=num_micro_batches))
    planned = make_plan(profile, ONE_WAY)
    simulator = Simulator(CostModel(profile))
    for policy, middle, ends in product(DwPolicy, (1, 2), (1, 2)):
        alone, ends_alone = fixed_plan(middle, policy), fixed_plan(ends, policy)
        assert planned.prediction.step_ms <= simulator.predict(alone).step_ms + CLOSE_MS
        of_pairs = simulator.predict(paired(alone, ends_alone)).step_ms
        assert planned.prediction.step_ms <= of_pairs + CLOSE_MS


@examples(10)
@given(machines(max_layers=4), st.integers(2, 7))
def test_pairing_is_never_slower_than_the_best_plan_without(machine, num_micro_batches):
    profile = synthetic_profile(dataclasses.replace(machine, num_micro_batches=num_micro_batches, stages=()))
    planned, alone = (make_plan(profile, Limits(pairing=p), max_exhaustive=0) for p in ((False, True), (False,)))
    assert not alone.plan.is_paired
    assert not any(one.plan.is_paired for one in alone.alternatives)
    assert planned.prediction.step_ms <= alone.prediction.step_ms + CLOSE_MS


def test_equal_times_choose_the_plan_without_pairing():
    machine = Machine(layers="mm", link_ms=0.0, latency_ms=0.0, counts_ms=0.0, dw_ms={}, num_micro_batches=4)
    assert make_plan(synthetic_profile(machine)).plan == fixed_plan(1, DwPolicy.NONE)


def test_chunks_go_to_the_ends_where_compute_is_the_longer():
    planned = make_plan(synthetic_profile(Machine(layers="mmmm", link_ms=6.0, num_micro_batches=8)))
    assert planned.plan.is_paired
    assert max(segment.num_chunks for segment in planned.plan.segments) == 1
    assert planned.plan.at_ends.num_chunks > 1


@pytest.mark.parametrize("num_micro_batches", [3, 4, 6])
def test_large_spaces_try_whole_micro_batches_with_cut_ends(num_micro_batches):
    """Also where whole micro-batches, with whole ones at the ends, are not among the fastest pairs."""
    profile = synthetic_profile(Machine(layers="mmmm", link_ms=8.0, num_micro_batches=num_micro_batches))
    simulator, whole, cut = Simulator(CostModel(profile)), fixed_plan(1), fixed_plan(2)
    assert simulator.predict(paired(cut)).step_ms < simulator.predict(paired(whole)).step_ms
    planned = make_plan(profile, max_exhaustive=0)
    assert planned.prediction.step_ms <= simulator.predict(paired(whole, cut)).step_ms + CLOSE_MS
    assert planned.plan.at_ends.num_chunks > planned.plan.in_middle.num_chunks


def test_two_micro_batches_have_one_setting():
    """They have no middle: other settings for it would say nothing."""
    planned = make_plan(synthetic_profile(Machine(layers="mmmm", link_ms=6.0, num_micro_batches=2)), max_exhaustive=0)
    assert planned.plan.at_ends.segments == planned.plan.segments


def test_pairing_is_excluded_with_a_reason():
    for machine, why in (
        (Machine(layers="mm", num_micro_batches=1), "one micro-batch"),
        (Machine(layers="mm", stages=(0, 1), num_micro_batches=4), "pipeline stages without virtual ones"),
    ):
        profile = synthetic_profile(machine)
        planned = make_plan(profile)
        assert not planned.plan.is_paired
        assert any(why in one.reason for one in planned.excluded if one.what == "pairing")
        with pytest.raises(RecordError, match=why):
            make_plan(profile, Limits(pairing=(True,)))
    virtual = synthetic_profile(Machine(layers="mmmm", stages=(0, 1, 0, 1), num_micro_batches=4))
    assert make_plan(virtual, Limits(pairing=(True,))).plan.is_paired


@pytest.mark.parametrize("host_polls", [False, True])
def test_gaps_of_a_pair_are_filled_as_planned(host_polls):
    machine = Machine(layers="mm", num_micro_batches=5, link_ms=9.0, sends_share_link=host_polls, host_polls=host_polls)
    profile = synthetic_profile(machine)
    planned = make_plan(profile, dataclasses.replace(ONE_WAY, pairing=(True,), dw_policies=(DwPolicy.FILL,)))
    plan = planned.plan
    assert plan.is_paired
    assert read_plan(plan.to_json()) == plan
    if not host_polls:
        gaps = {gap.op: gap.weight_grads for gap in plan.gaps}
        assert gaps
        simulation = Simulator(CostModel(profile)).simulate(plan)
        assert {wait.name: wait.filled for wait in simulation.waits[0] if wait.filled} == gaps


def test_explanation_says_what_the_other_choice_costs():
    profile = synthetic_profile(Machine(layers="mmmm", link_ms=6.0, num_micro_batches=8))
    planned = make_plan(profile)
    explanation = explain(profile, planned.plan, planned)
    assert other_pairing_ms(explanation) > planned.prediction.step_ms
    assert {layer.num_times for layer in explanation.layers} == {7}
    assert {layer.num_times for layer in explanation.ends} == {1}


def test_reasons_add_up_to_the_exposed_time_of_a_step():
    """As far as the pairs near the ends of the step are like the others."""
    profile = synthetic_profile(Machine(layers="mmmm", link_ms=30.0, num_micro_batches=20))
    explanation = explain(profile, paired(fixed_plan(1)))
    assert sum(explanation.exposed_by_reason().values()) == pytest.approx(explanation.prediction.exposed_ms, rel=0.02)


def test_stages_split_the_ends_too():
    plan = split_at_stages(paired(fixed_plan(1), fixed_plan(2)), (0, 1, 0, 1))
    assert [segment.first_layer for segment in plan.at_ends.segments] == [1, 2, 3, 4]
    assert [segment.first_layer for segment in plan.segments] == [1, 2, 3, 4]
