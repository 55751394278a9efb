"""``--lancet-profile FILE``: the first steps of a run are measured, and then it ends."""

import argparse
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.num_microbatches_calculator import get_num_microbatches
from tqdm import tqdm

from megatron_lancet.config import LancetConfig
from megatron_lancet.errors import UsageError
from megatron_lancet.planning.search.gradient_overlap import measured_with
from megatron_lancet.planning.search.search_space import Limits
from megatron_lancet.profiler.cache import write
from megatron_lancet.profiler.facts import ProfiledModel
from megatron_lancet.profiler.measure import ProfileRun, num_profile_steps, plans_to_profile
from megatron_lancet.schedule.plan import OverlapRange, Plan
from megatron_lancet.training.overlap_setup import OverlapSetup
from megatron_lancet.training.plan.comm_priority import reduction_of
from megatron_lancet.training.plan.limits import planning_limits

_FLAG = "--lancet-profile"


def check_can_profile(args: argparse.Namespace, config: LancetConfig, plan: Plan | None) -> None:
    """
    Raises:
        UsageError: a profile is asked for that this run can't give.
    """
    if config.profile is None:
        return
    if plan is None:
        raise UsageError(
            f"{_FLAG} measures the overlapping block, and this run has none. Use --expert-model-parallel-size of at "
            "least 2 and drop --lancet-plan off."
        )
    if not config.profile.parent.is_dir():
        raise UsageError(f"{_FLAG}: no such folder: {config.profile.parent}")
    if args.save or args.load:
        raise UsageError(f"{_FLAG} ends the run after some steps and keeps no weights: drop --save and --load.")
    num_steps = num_profile_steps(plans_within(args, planning_limits(args, config)))
    if args.train_iters is None or args.train_iters < num_steps:
        raise UsageError(f"{_FLAG} needs {num_steps} steps; pass --train-iters {num_steps}, not {args.train_iters}.")


def profiled_model(args: argparse.Namespace, setup: OverlapSetup, device: torch.device) -> ProfiledModel:
    """What runs, for the profiler; once Megatron has built it."""
    return ProfiledModel(
        stages=setup.stages,
        device=device,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        num_micro_batches=get_num_microbatches(),
    )


def plans_within(args: argparse.Namespace, limits: Limits) -> list[Plan]:
    """What to profile for a planner that keeps to ``limits``."""
    plans = plans_to_profile(
        args.micro_batch_size,
        args.seq_length // args.context_parallel_size,
        limits.chunk_dims,
        overlap_range=max(limits.ranges, key=list(OverlapRange).index),
    )
    return [replace(plan, dw_memory_bytes=limits.dw_memory_bytes) for plan in plans]


class Profiling:
    """Runs the steps of a profile in Megatron's training loop, and ends it."""

    def __init__(
        self, args: argparse.Namespace, config: LancetConfig, setup: OverlapSetup, device: torch.device
    ) -> None:
        """
        Args:
            args: Megatron's.
            setup: switchable.
        """
        self._args = args
        self._config = config
        self._setup = setup
        self._device = device
        self._plans = plans_within(args, planning_limits(args, config))
        self._run: ProfileRun | None = None
        self._bar: tqdm[Any] | None = None
        self._num_done = 0

    def observe(self, step: Callable[[], Any]) -> Any:
        """Run a training step and measure it; after the last one write the profile and let training end."""
        if self._run is None:
            self._run = ProfileRun(profiled_model(self._args, self._setup, self._device), self._plans)
            silent = dist.get_rank() != 0
            self._bar = tqdm(total=len(self._run.plans) + 1, desc="profile", unit="step", disable=silent)
        run, bar = self._run, self._bar
        assert bar is not None
        plan = run.plans[self._num_done]
        if plan != self._setup.plan:
            self._setup.switch(plan)
        bar.set_postfix_str(str(plan))
        with run.step(self._num_done):
            result = step()
        self._num_done += 1
        bar.update()
        if self._num_done == len(run.plans):
            with ExitStack() as stack:
                stack.callback(bar.close)
                bar.set_postfix_str("links")
                self._finish(run)
                bar.update()
                if dist.get_rank() == 0:
                    bar.write(f"profile written to {self._config.profile}")
        return result

    def _finish(self, run: ProfileRun) -> None:
        profile = run.finish()
        if dist.get_rank() == 0:
            assert self._config.profile is not None
            reduction = reduction_of(self._args, self._config)
            if reduction is not None:
                profile = measured_with(profile, reduction, self._plans)
            write(self._config.profile, profile)
        # The loop looks at it before each step; it counts this one afterwards.
        self._args.train_iters = self._args.curr_iteration + 1
