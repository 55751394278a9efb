"""Makes the content of a plan file: a plan with its prediction by the cost model."""

import dataclasses
from collections.abc import Sequence

from megatron_lancet.planning.plan_file import ExpectedStep, LayerExposure, PlanFile, Source, made_for
from megatron_lancet.planning.profile import Profile
from megatron_lancet.planning.simulation.cost_model import CostModel
from megatron_lancet.planning.simulation.simulator import Simulator, simulate
from megatron_lancet.planning.what_if.layout import split_at_stages
from megatron_lancet.schedule.ops import Op
from megatron_lancet.schedule.plan import DwPolicy, Plan, fixed_plan
from megatron_lancet.schedule.timeline import Lane, RankTimeline


def record_of(profile: Profile, plan: Plan) -> PlanFile:
    """The content of a plan file for a plan that was made from a profile.

    Raises:
        RecordError: the plan does not fit the profile's model, or something was not profiled.
    """
    num_micro_batches = profile.model.num_micro_batches
    simulator = Simulator(CostModel(profile))
    prediction = simulator.predict(plan)
    # One micro-batch is enough for the timeline: a step may have hundreds, and all are alike.
    one = dataclasses.replace(profile, model=dataclasses.replace(profile.model, num_micro_batches=1))
    exposed = exposed_by_layer(simulate(one, plan).timelines)
    stock = split_at_stages(fixed_plan(1, DwPolicy.NONE), profile.model.stage_of_layer)
    expected = ExpectedStep(
        step_ms=prediction.step_ms,
        no_overlap_step_ms=simulator.predict(stock).step_ms,
        exposed_ms=prediction.exposed_ms,
        peak_bytes=prediction.peak_bytes,
        peak_dw_bytes=prediction.peak_dw_bytes,
        layers=tuple(LayerExposure(e.layer, e.exposed_ms * num_micro_batches) for e in exposed),
    )
    source = Source(profile.model.name, profile.device, dict(profile.versions))
    return PlanFile(plan, made_for(profile.model), expected, source)


def exposed_by_layer(timelines: Sequence[RankTimeline]) -> tuple[LayerExposure, ...]:
    """Time for which compute waits for each layer's messages, on the rank that waits longest."""
    most: dict[int, float] = {}
    for timeline in timelines:
        of_rank: dict[int, float] = {}
        for span in timeline.spans:
            if span.lane is Lane.WAIT:
                layer = Op.parse(span.name).layer
                assert layer is not None, span.name
                of_rank[layer] = of_rank.get(layer, 0.0) + span.ms
        most = {layer: max(of_rank.get(layer, 0.0), most.get(layer, 0.0)) for layer in of_rank | most}
    return tuple(LayerExposure(layer, exposed_ms) for layer, exposed_ms in sorted(most.items()))
