"""Profiles training steps: which plans they run by, and the profile that is made from them."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.num_microbatches_calculator import get_num_microbatches

from megatron_lancet.config import LancetConfig
from megatron_lancet.feature import message_sms
from megatron_lancet.model.te.token_multiple import token_multiple
from megatron_lancet.planning.profile import Profile
from megatron_lancet.planning.search.gradient_overlap import measured_with
from megatron_lancet.planning.search.search_space import Limits
from megatron_lancet.profiler.facts import ProfiledModel
from megatron_lancet.profiler.measure import ProfileRun, plans_to_profile
from megatron_lancet.schedule.plan import OverlapRange, Plan
from megatron_lancet.schedule.reductions import GradientReduction
from megatron_lancet.training.overlap_setup import OverlapSetup
from megatron_lancet.training.plan.support import micro_batch_shape


def num_steps_left(args: argparse.Namespace, num_done: int = 0) -> int:
    """Steps until Megatron ends the run, at most: at its last iteration, or where an option ends a part of a run.

    Args:
        num_done: the run's iterations so far.
    """
    ends = [args.train_iters, *(end for end in args.phase_transition_iterations or () if end > num_done)]
    if args.exit_interval:
        ends.append(num_done - num_done % args.exit_interval + args.exit_interval)
    return int(min(ends)) - num_done


def profiled_model(
    args: argparse.Namespace, config: LancetConfig, setup: OverlapSetup, device: torch.device
) -> ProfiledModel:
    """Describes the model that Megatron has built and its batch to the profiler."""
    samples, positions = micro_batch_shape(args, config)
    return ProfiledModel(
        stages=setup.stages,
        device=device,
        micro_batch_size=samples,
        seq_length=positions,
        num_micro_batches=get_num_microbatches(),
        comm_sms=message_sms(config),  # with the default products keep all SMs
        attention=str(config.attention),
    )


def plans_within(args: argparse.Namespace, config: LancetConfig, limits: Limits) -> list[Plan]:
    """Plans to profile for a planner with these limits."""
    samples, positions = micro_batch_shape(args, config)
    plans = plans_to_profile(
        samples,
        positions // args.context_parallel_size,
        limits.chunk_dims if limits.ranges else (),
        overlap_range=max(limits.ranges, key=list(OverlapRange).index, default=OverlapRange.EXPERTS),
        token_multiple=token_multiple(args),
        dispatches=limits.dispatches,
        has_tiles=limits.tiles is None or any(limits.tiles),
    )
    return [replace(plan, dw_memory_bytes=limits.dw_memory_bytes) for plan in plans]


def with_own_reduction(profile: Profile, reduction: GradientReduction | None, plans: Sequence[Plan]) -> Profile:
    """Removes the time that a run's own steps waited for gradients from its profile: other runs wait differently.

    Args:
        reduction: how the run reduced its gradients during the backward pass; None if it did not.
        plans: the profiled plans.

    Raises:
        UnknownCost: the profile has no all-reduce times.
    """
    return profile if reduction is None else measured_with(profile, reduction, plans)


class ProfileSteps:
    """Runs a :class:`ProfileRun` in the steps of a training run.

    Between two steps the caller switches all ranks to :attr:`next_plan`, until that is None.

    Attributes:
        num_done: steps that have run.
    """

    def __init__(self, run: ProfileRun) -> None:
        self._run = run
        self.num_done = 0

    @property
    def plans(self) -> list[Plan]:
        """The plan of each step, in order. Neighbours are often equal."""
        return self._run.plans

    @property
    def next_plan(self) -> Plan | None:
        """The plan of the next step; None when all steps are done."""
        return self.plans[self.num_done] if self.num_done < len(self.plans) else None

    def run_step(self, step: Callable[[], Any]) -> Any:
        """Runs a training step under :attr:`next_plan`, measures it, and returns the step's result."""
        with self._run.step(self.num_done):
            result = step()
        self.num_done += 1
        return result

    def drop(self) -> None:
        """Leaves out :attr:`next_plan`, none of whose steps has run."""
        dropped = self.next_plan
        self._run.plans = [plan for plan in self.plans if plan != dropped]

    def finish(self) -> Profile:
        """Measures the links and makes the profile. Collective over all ranks, after the last step."""
        return self._run.finish()
