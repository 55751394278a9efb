"""``--lancet-profile FILE``: profiles the first steps of a run, writes the profile and ends the run."""

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.num_microbatches_calculator import get_num_microbatches
from tqdm import tqdm

from megatron_lancet.config import LancetConfig
from megatron_lancet.errors import UsageError
from megatron_lancet.feature import Steering
from megatron_lancet.features.tuning.flags import TuningFlags
from megatron_lancet.features.tuning.profile_steps import (
    ProfileSteps,
    num_steps_left,
    plans_within,
    profiled_model,
    with_own_reduction,
)
from megatron_lancet.features.tuning.reductions import reduction_of
from megatron_lancet.profiler.cache import write
from megatron_lancet.profiler.measure import ProfileRun, num_profile_steps
from megatron_lancet.schedule.plan import Plan
from megatron_lancet.training.overlap_setup import OverlapSetup
from megatron_lancet.training.plan.limits import planning_limits

FLAG = "--lancet-profile"


def check_can_profile(args: argparse.Namespace, config: LancetConfig, plan: Plan | None) -> None:
    """
    Raises:
        UsageError: ``--lancet-profile`` does not work with the other flags, or the run is too short.
    """
    file = config.of(TuningFlags).profile
    if file is None:
        return
    if plan is None:
        raise UsageError(
            f"{FLAG} measures the overlapping block, and this run has stock Megatron modules. Use "
            "--expert-model-parallel-size of at least 2 and drop --lancet-plan off."
        )
    if not file.parent.is_dir():
        raise UsageError(f"{FLAG}: no such folder: {file.parent}")
    if args.save or args.load:
        raise UsageError(f"{FLAG} ends the run after some steps and keeps no weights: drop --save and --load.")
    num_steps = num_profile_steps(plans_within(args, config, planning_limits(args, config)))
    num_left = None if args.train_iters is None else num_steps_left(args)
    if num_left is None or num_left < num_steps:
        raise UsageError(
            f"{FLAG} needs {num_steps} steps, found {num_left}. Pass --train-iters {num_steps}, and no --exit-interval "
            "or --phase-transition-iterations that ends the run sooner."
        )


class ProfileToFile(Steering):
    """Profiles the steps of Megatron's training loop, with a switchable setup; writes the profile and ends the loop."""

    writes_only = True

    def __init__(
        self, args: argparse.Namespace, config: LancetConfig, setup: OverlapSetup, device: torch.device
    ) -> None:
        self._args = args
        self._config = config
        self._file = config.of(TuningFlags).profile
        self._setup = setup
        self._device = device
        self._plans = plans_within(args, config, planning_limits(args, config))
        self._progress: tuple[ProfileSteps, tqdm[Any]] | None = None
        self._num_micro_batches = 0

    def observe(self, step: Callable[[], Any]) -> Any:
        """Runs a training step and measures it; after the last one writes the profile and lets training end.

        Raises:
            UsageError: the batch has grown since the first step.
        """
        now = get_num_microbatches()
        if self._progress is None:
            self._num_micro_batches = now
            model = profiled_model(self._args, self._config, self._setup, self._device)
            steps = ProfileSteps(ProfileRun(model, self._plans))
            silent = dist.get_rank() != 0
            self._progress = steps, tqdm(total=len(steps.plans) + 1, desc="profile", unit="step", disable=silent)
        elif now != self._num_micro_batches:
            raise UsageError(
                f"{FLAG} needs steps of one size, found {now} micro-batches in a step after {self._num_micro_batches}. "
                "Drop --step-batch-size-schedule and --rampup-batch-size."
            )
        steps, bar = self._progress
        plan = steps.next_plan
        assert plan is not None
        if plan != self._setup.plan:
            self._setup.switch(plan)
        bar.set_postfix_str(str(plan))
        result = steps.run_step(step)
        bar.update()
        if steps.next_plan is None:
            with bar:
                bar.set_postfix_str("links")
                self._finish(steps)
                bar.update()
                if dist.get_rank() == 0:
                    bar.write(f"profile written to {self._file}")
        return result

    def _finish(self, steps: ProfileSteps) -> None:
        profile = steps.finish()
        if dist.get_rank() == 0:
            assert self._file is not None
            profile = with_own_reduction(
                profile, reduction_of(self._args, self._config, self._setup.stages), self._plans
            )
            write(self._file, profile)
        # The loop compares the two before each step, and counts this step afterwards.
        self._args.train_iters = self._args.curr_iteration + 1
