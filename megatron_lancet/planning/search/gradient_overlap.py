"""Converts a profile to another kind of gradient reduction.

``rest_ms`` of a profile includes the wait for gradients if they are reduced after the backward pass, and excludes it if
the simulator adds it.
"""

import dataclasses
from collections.abc import Sequence

from megatron_lancet.planning.profile import Profile
from megatron_lancet.planning.simulation.cost_model import CostModel
from megatron_lancet.planning.simulation.simulator import Simulator
from megatron_lancet.planning.stages import split_at_stages
from megatron_lancet.schedule.plan import Plan, fixed_plan
from megatron_lancet.schedule.reductions import GradientReduction


def with_reduction(profile: Profile, reduction: GradientReduction | None) -> Profile:
    """The profile of a run that reduces its gradients as ``reduction`` says.

    Args:
        reduction: None if gradients are reduced after the backward pass.

    Raises:
        UnknownCost: the profile has no all-reduce times.
    """
    before, rest_ms = profile.gradients, profile.rest_ms
    if before is None and reduction is not None:
        rest_ms -= min(rest_ms, _alone_ms(profile, reduction))
    elif before is not None and reduction is None:
        rest_ms += _alone_ms(profile, before)
    return dataclasses.replace(profile, gradients=reduction, rest_ms=rest_ms)


def measured_with(profile: Profile, reduction: GradientReduction, plans: Sequence[Plan]) -> Profile:
    """The profile of a run that reduced its gradients during the backward pass, without that wait in ``rest_ms``.

    Args:
        profile: the measured profile, whose ``rest_ms`` includes the wait.
        reduction: how the run reduced its gradients.
        plans: the plans that were measured; the wait is the mean of their simulated waits.

    Raises:
        UnknownCost: the profile has no all-reduce times.
    """
    simulator = Simulator(CostModel(dataclasses.replace(profile, gradients=reduction)))
    plans = [split_at_stages(plan, profile.model.stage_of_layer) for plan in plans]
    waited_ms = sum(simulator.predict(plan).gradient_ms for plan in plans) / len(plans)
    rest_ms = max(0.0, profile.rest_ms - waited_ms)
    return dataclasses.replace(profile, gradients=reduction, rest_ms=rest_ms)


def _alone_ms(profile: Profile, reduction: GradientReduction) -> float:
    """Time of all reductions of the fullest stage, one after the other."""
    simulator = Simulator(CostModel(dataclasses.replace(profile, gradients=reduction)))
    plan = split_at_stages(fixed_plan(1), profile.model.stage_of_layer)
    sums_ms = [sum(one.ms for one in stage.buckets.reductions) for stage in simulator.stages(plan) if stage.buckets]
    return max(sums_ms, default=0.0)
