"""Makes the content of a plan file: a plan with its prediction by the cost model."""

import dataclasses
from collections.abc import Sequence

from megatron_lancet.planning.plan_file import ExpectedStep, LayerExposure, PlanFile, Source, made_for
from megatron_lancet.planning.profile import Profile
from megatron_lancet.planning.simulation.cost_model import CostModel
from megatron_lancet.planning.simulation.simulator import MAX_PLAYED_WITH_ENDS, Simulator, simulate
from megatron_lancet.planning.stages import split_at_stages
from megatron_lancet.schedule.ops import Op
from megatron_lancet.schedule.plan import DwPolicy, Plan, fixed_plan
from megatron_lancet.schedule.timeline import Lane, RankTimeline


def record_of(profile: Profile, plan: Plan) -> PlanFile:
    """The content of a plan file for a plan that was made from a profile.

    Raises:
        RecordError: the plan does not fit the profile's model, or something was not profiled.
    """
    simulator = Simulator(CostModel(profile))
    prediction = simulator.predict(plan)
    stock = split_at_stages(fixed_plan(1, DwPolicy.NONE), profile.model.stage_of_layer)
    expected = ExpectedStep(
        step_ms=prediction.step_ms,
        no_overlap_step_ms=simulator.predict(stock).step_ms,
        exposed_ms=prediction.exposed_ms,
        peak_bytes=prediction.peak_bytes,
        peak_dw_bytes=prediction.peak_dw_bytes,
        layers=_exposed_in_step(profile, plan),
    )
    source = Source(profile.model.name, profile.device, dict(profile.versions))
    return PlanFile(plan, made_for(profile.model), expected, source)


def _exposed_in_step(profile: Profile, plan: Plan) -> tuple[LayerExposure, ...]:
    """Exposed time of each layer in a step.

    A step may have hundreds of micro-batches, most of which are alike, so only a few are simulated.
    """
    few = min(MAX_PLAYED_WITH_ENDS, profile.model.num_micro_batches) if plan.is_paired else 1

    def exposed_in(num_micro_batches: int) -> dict[int, float]:
        model = dataclasses.replace(profile.model, num_micro_batches=num_micro_batches)
        simulation = simulate(dataclasses.replace(profile, model=model), plan)
        return {one.layer: one.exposed_ms for one in exposed_by_layer(simulation.timelines)}

    of_few = exposed_in(few)
    num_more = profile.model.num_micro_batches - few
    if not num_more:
        return tuple(LayerExposure(*one) for one in of_few.items())
    if not plan.is_paired:
        return tuple(LayerExposure(layer, ms * (1 + num_more)) for layer, ms in of_few.items())
    return tuple(
        LayerExposure(layer, of_few.get(layer, 0.0) + num_more * (ms - of_few.get(layer, 0.0)))
        for layer, ms in exposed_in(few + 1).items()
    )


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
