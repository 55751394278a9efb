"""Multi-token predictions in profiles, in the simulator, in the planner and in other layouts."""

import dataclasses

import pytest

from benchmarks.synthetic_profile import Machine, synthetic_profile
from megatron_lancet.lab.what_if.layout import Layout, gradient_bytes, stages_of_layers
from megatron_lancet.planning.plan_file import made_for
from megatron_lancet.planning.profile import MemoryUse, OpTime, Profile, WeightGradTime, profile_from_json
from megatron_lancet.planning.search.planner import make_plan
from megatron_lancet.planning.search.search_space import Limits, SearchSpace
from megatron_lancet.planning.simulation.buckets import Buckets
from megatron_lancet.planning.simulation.cost_model import CostModel
from megatron_lancet.planning.simulation.simulator import Simulator
from megatron_lancet.schedule.layers import LayerKind
from megatron_lancet.schedule.ops import OpKind, Phase
from megatron_lancet.schedule.plan import ChunkDim, DwPolicy, Plan, Segment, fixed_plan
from megatron_lancet.schedule.reductions import CommPriority, GradientReduction

SHARES, PROJECTION_MS, PROJECTION_DW_MS, PROJECTION_BYTES, EH_PROJ_BYTES = (0.25,) * 4, 2.0, 0.75, 5_000, 300


def predicting(layers: str = "mmmm", repeats: bool = False, stages: tuple[int, ...] = ()) -> Profile:
    """The last two of ``layers`` are predictions."""
    plain = synthetic_profile(Machine(layers, stages, shares=SHARES, num_micro_batches=2))
    facts = dataclasses.replace(plain.model, num_mtp_layers=2, repeats_mtp_layer=repeats, num_output_uses=3)
    times = [
        OpTime(LayerKind.MTP, OpKind.MTP_PROJECTION, phase, ChunkDim.BATCH, 1, 0, 512, PROJECTION_MS)
        for phase in (Phase.FORWARD, Phase.INPUT_GRAD)
    ]
    weight = WeightGradTime(
        LayerKind.MTP, "eh_proj", 1, 512, PROJECTION_DW_MS, 1_000, EH_PROJ_BYTES, OpKind.MTP_PROJECTION
    )
    return dataclasses.replace(
        plain,
        model=facts,
        ops=(*plain.ops, *times),
        weight_grads=(*plain.weight_grads, weight),
        memory=(*plain.memory, MemoryUse(LayerKind.MTP, ChunkDim.BATCH, 1, PROJECTION_BYTES)),
        gradients=GradientReduction(2, 2, CommPriority.OFF, bucket_bytes=1),
        link=dataclasses.replace(plain.link, all_reduce=((0, 0.1), (10**9, 10.0))),
    )


def test_profile_with_and_without_predictions_is_read_back():
    profile = predicting(repeats=True)
    assert profile_from_json(profile.to_json(), "p.json") == profile
    facts = profile_from_json(synthetic_profile(Machine()).to_json(), "p.json").model
    assert list(facts.mtp_layers) == []
    assert facts.num_output_uses == 1


@pytest.mark.parametrize("repeats", [False, True])
def test_simulated_prediction_adds_its_projection_to_a_layer(repeats):
    profile = predicting(repeats=repeats)
    plain = dataclasses.replace(
        profile, model=dataclasses.replace(profile.model, num_mtp_layers=0, repeats_mtp_layer=False, num_output_uses=1)
    )
    plan = Plan((Segment(1, 2, 2), Segment(3, 3, 2), Segment(4, None, 2)), dw_policy=DwPolicy.NONE)
    ours, other = (Simulator(CostModel(one), SHARES).predict(plan) for one in (profile, plain))
    # Two micro-batches with two projections each, and two more weight gradients of the output layer.
    head_dw_ms = next(grad.ms for grad in profile.weight_grads if grad.after == OpKind.HEAD)
    added_ms = 2 * (2 * (2 * PROJECTION_MS + PROJECTION_DW_MS) + 2 * head_dw_ms)
    assert ours.step_ms - ours.gradient_ms - other.step_ms + other.gradient_ms == pytest.approx(added_ms)
    assert ours.peak_bytes - other.peak_bytes == 2 * PROJECTION_BYTES


def test_segment_over_predictions_is_simulated_like_one_for_each():
    simulator = Simulator(CostModel(predicting()), SHARES)
    apart = Plan((Segment(1, 2, 2), Segment(3, 3, 2), Segment(4, None, 2)), dw_window=4)
    assert simulator.predict(fixed_plan(2)) == simulator.predict(apart)


def test_weights_of_a_repeated_prediction_are_reported_once():
    def buckets(repeats: bool) -> Buckets:
        costs = CostModel(predicting(repeats=repeats))
        (stage,) = Simulator(costs, SHARES).stages(fixed_plan(2))
        assert stage.buckets is not None
        return stage.buckets

    once, repeated = buckets(False), buckets(True)
    names = {grad.name for grad in predicting().weight_grads if grad.layer_kind in (LayerKind.MOE, LayerKind.MTP)}
    for name in names - {weight for layer, weight in once.num_puts if layer == 0}:
        assert {layer for layer, weight in once.num_puts if weight == name and layer > 2} == {3, 4}
        assert {layer for layer, weight in repeated.num_puts if weight == name and layer > 2} == {3}
        assert repeated.num_puts[3, name] == once.num_puts[3, name] + once.num_puts[4, name]
    assert len(repeated.bucket_of) < len(once.bucket_of)


@pytest.mark.parametrize("stages", [(), (0, 0, 0, 1), (0, 0, 1, 1)])
def test_equal_segments_are_joined_over_predictions(stages):
    profile = predicting(stages=stages)
    space = SearchSpace.of(CostModel(profile), Limits())
    assert space.runs == ((1, 2), (3, 3), (4, 4))
    ends = {(): [None], (0, 0, 0, 1): [3, None], (0, 0, 1, 1): [2, None]}[stages]
    assert all([segment.last_layer for segment in segments] == ends for segments in space.uniform())
    planned = make_plan(profile, Limits())
    simulator = Simulator(CostModel(profile))
    stock = next(segments for segments in space.uniform())
    assert planned.prediction.step_ms <= simulator.predict(Plan(stock, dw_policy=DwPolicy.NONE)).step_ms


def test_predictions_stay_on_the_last_stage_of_another_layout():
    facts = predicting("mmmmmm").model
    assert stages_of_layers(facts, 2) == (0, 0, 1, 1, 1, 1)
    assert stages_of_layers(facts, 4) == (0, 1, 2, 3, 3, 3)


def test_gradients_of_a_repeated_prediction_count_once():
    layout = Layout(4, 4, 1, 2, None, SHARES)
    ((once, _),), ((repeated, _),) = (gradient_bytes(predicting(repeats=one), layout) for one in (False, True))
    ((two, _),), ((three, _),) = (
        gradient_bytes(synthetic_profile(Machine(layers, shares=SHARES)), layout) for layers in ("mm", "mmm")
    )
    assert once == two + 2 * (three - two + EH_PROJ_BYTES)
    assert repeated == three + EH_PROJ_BYTES


def test_plan_file_tells_predictions_from_layers():
    ours = made_for(predicting().model)
    assert (ours.num_layers, ours.num_mtp_layers) == (4, 2)
    assert ours != made_for(synthetic_profile(Machine("mmmm", shares=SHARES)).model)
