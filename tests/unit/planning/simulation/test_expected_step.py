"""Replays at the paces that ranks had in the profile's steps, and steps with virtual stages."""

import dataclasses

import pytest

from benchmarks.synthetic_profile import Machine, synthetic_profile
from megatron_lancet.planning.profile import ChunkRouting, Profile, StepPace, read_profile
from megatron_lancet.planning.simulation.cost_model import CostModel
from megatron_lancet.planning.simulation.simulator import Simulator, simulate
from megatron_lancet.planning.stages import slots_of_bubble
from megatron_lancet.schedule.plan import ChunkDim, DwPolicy, Plan, Segment, fixed_plan

OPS_MS = {"attention": 4.0, "route": 1.0, "preprocess": 1.0, "experts": 6.0, "postprocess": 1.0, "head": 3.0}
AT_ONCE = fixed_plan(1, DwPolicy.NONE)


def profile_with(*paces: StepPace, dw_ms: dict[str, float] | None = None) -> Profile:
    """One layer on two ranks that get the same rows; messages take 2 ms."""
    machine = Machine(
        layers="m", op_ms=OPS_MS, dw_ms=dw_ms or {}, link_ms=4.0, latency_ms=0.0, counts_ms=0.0, overhead_ms=0.0
    )
    profile = synthetic_profile(machine)
    rows = profile.model.num_rows
    routing = (ChunkRouting(1, ChunkDim.BATCH, 1, 0, (rows // 2,) * 2, (rows,) * 2),)
    return dataclasses.replace(profile, paces=paces, routing=routing)


def pace(layer=(1.0, 1.0), beside=(1.0, 1.0), backward=(1.0, 1.0)) -> StepPace:
    return StepPace((beside, layer), ((1.0, 1.0), backward))


def expect(profile, plan):
    return Simulator(CostModel(profile)).expected_step(plan)


def test_expected_step_with_even_paces_equals_the_simulation():
    profile = profile_with(pace())
    simulation = simulate(profile, AT_ONCE)
    expected = expect(profile, AT_ONCE)
    assert expected.step_ms == pytest.approx(simulation.prediction.step_ms)
    assert expected.exposed_ms == pytest.approx(simulation.prediction.exposed_ms)


def test_expected_step_without_paces_equals_the_simulation():
    profile = profile_with()
    assert expect(profile, AT_ONCE).step_ms == simulate(profile, AT_ONCE).prediction.step_ms


def test_expected_step_waits_for_a_slow_rank_in_each_all_to_all():
    even, uneven = (expect(profile_with(one), AT_ONCE) for one in (pace(), pace(layer=(1.0, 1.5))))
    # Before the dispatch 6 ms, experts 6 ms and after the combine 1 ms: rank 1 takes 50 % longer.
    assert uneven.step_ms - even.step_ms == pytest.approx(6.5)
    # Rank 0 waits 3 ms at the dispatch, 3 ms at the combine, and for what rank 1's merge takes longer in the backward.
    assert uneven.exposed_ms - even.exposed_ms == pytest.approx(6.5 / 2)


def test_paces_differ_by_layer_and_pass():
    profile = profile_with(pace())
    even = expect(profile, AT_ONCE).step_ms
    both_beside = expect(profile_with(pace(beside=(2.0, 2.0))), AT_ONCE).step_ms
    assert both_beside - even == pytest.approx(OPS_MS["head"])
    both_backward = expect(profile_with(pace(backward=(2.0, 2.0))), AT_ONCE).step_ms
    assert both_backward - even == pytest.approx(13.0)


def test_weight_gradients_have_the_pace_of_their_layer():
    even, slow = (
        expect(profile_with(one, dw_ms={"experts": 6.0}), AT_ONCE).step_ms
        for one in (pace(), pace(backward=(2.0, 2.0)))
    )
    assert slow - even == pytest.approx(13.0 + 6.0)


def test_expected_step_is_the_median_of_the_steps():
    slow, slower = pace(layer=(2.0, 2.0)), pace(layer=(9.0, 9.0))
    alone = expect(profile_with(slow), AT_ONCE)
    assert expect(profile_with(pace(), slow, slower), AT_ONCE) == alone


def test_profile_keeps_paces_in_json(tmp_path):
    profile = profile_with(pace(layer=(1.25, 0.75)))
    (tmp_path / "profile.json").write_text(profile.to_json())
    assert read_profile(tmp_path / "profile.json") == profile


def test_virtual_stages_fill_in_shorter_slots():
    plain, virtual = (
        Machine(layers="mmmm", stages=stages, num_micro_batches=4) for stages in ((0, 0, 1, 1), (0, 1, 0, 1))
    )
    own = Plan(tuple(Segment(number, number if number < 4 else None, 1) for number in (1, 2, 3, 4)), DwPolicy.NONE)
    whole, half = (simulate(synthetic_profile(machine), own).prediction for machine in (plain, virtual))
    assert half.step_ms == pytest.approx(whole.step_ms - whole.slot_ms / 2)
    assert (slots_of_bubble((0, 0, 1, 2)), slots_of_bubble((0, 1, 0, 1, 0, 1)), slots_of_bubble((0, 0))) == (
        2,
        1 / 3,
        0,
    )
