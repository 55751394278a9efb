"""A run that overlaps: what stands beside Megatron's loop, and in which order a step passes through it."""

import argparse
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta

import torch

from megatron_lancet.config import LancetConfig
from megatron_lancet.runtime.comm_stats import CommStats
from megatron_lancet.schedule.plan import Plan
from megatron_lancet.schedule.reductions import MicroOps
from megatron_lancet.training.megatron import checkpoint_patches, patches
from megatron_lancet.training.megatron.grad_reduction import reductions_in_micro_ops
from megatron_lancet.training.observe.run_report import report_overlap
from megatron_lancet.training.observe.step_recorder import StepRecorder
from megatron_lancet.training.observe.traced_steps import TracedSteps
from megatron_lancet.training.overlap_setup import NoOverlap, OverlapSetup
from megatron_lancet.training.plan.attention import needs_own_attention, uses_sdpa
from megatron_lancet.training.plan.select import is_tuned
from megatron_lancet.training.tuning.autotune import AutoTune
from megatron_lancet.training.tuning.controller import Tuning, plan_without_overlap
from megatron_lancet.training.tuning.plan_maker import ProfilingPlanMaker
from megatron_lancet.training.tuning.profiling import Profiling


def enter_run(
    stack: ExitStack,
    args: argparse.Namespace,
    config: LancetConfig,
    plan: Plan | None,
    device: torch.device,
    stats: CommStats,
    recorder: StepRecorder,
    micro_ops: MicroOps | None = None,
) -> tuple[NoOverlap | OverlapSetup, Callable[[], None]]:
    """Changes Megatron for the length of ``stack``, before it builds its model.

    Args:
        plan: None for stock modules.
        micro_ops: of gradient reductions, where all-to-alls go first; None where they don't.

    Returns:
        A hook for Megatron's model builder, and what reports the end of the run. Both are collective over all ranks.

    Raises:
        UsageError: a wish of the user that the run does not allow.
    """
    stack.enter_context(patches.sequence_parallel_with_torch_norm())
    stack.enter_context(patches.core_attention_without_te(needs_own_attention(args) is not None))
    stack.enter_context(patches.resumable_distributed_optimizer())
    if plan is None:
        stack.enter_context(patches.measured_stock_communication(stats))
        stack.enter_context(patches.observed_train_step(recorder.observe))
        return NoOverlap(config.experts_apart), lambda: recorder.report(None, config.report_dir)
    run = OverlappedRun(args, config, plan, device, stats, recorder, micro_ops)
    run.enter(stack)
    return run.setup, run.report


class OverlappedRun:
    """Puts the parts together.

    Attributes:
        setup: a hook for Megatron's model builder.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        config: LancetConfig,
        plan: Plan,
        device: torch.device,
        stats: CommStats,
        recorder: StepRecorder,
        micro_ops: MicroOps | None = None,
    ) -> None:
        """
        Args:
            plan: a fixed one, or what a run gets that is too short to find its own.
            micro_ops: of gradient reductions, where all-to-alls go first; None where they don't.

        Raises:
            UsageError: a wish of the user that the run does not allow.
        """
        self._config = config
        self._recorder = recorder
        self._maker: ProfilingPlanMaker | None = None
        self._tuner: AutoTune | None = None
        self._profiling: Profiling | None = None
        self._traced: TracedSteps | None = None
        profiles = config.profile is not None
        tunes = is_tuned(args, config)
        timeout = timedelta(minutes=args.distributed_timeout_minutes)
        first_plan = plan_without_overlap() if tunes else plan
        self.setup = OverlapSetup(
            first_plan, device, stats, timeout, uses_sdpa(args, config), profiles or tunes, micro_ops
        )
        if profiles:
            self._profiling = Profiling(args, config, self.setup, device)
        if tunes:
            tuning = Tuning(config.tune_steps)
            self._maker = ProfilingPlanMaker(args, config, self.setup, device, tuning.note)
            self._tuner = AutoTune(args, tuning, self.setup, recorder, self._maker, plan, device)
        if config.report_dir is not None and not profiles:
            is_settled = self._tuner.is_settled if self._tuner is not None else lambda: True
            self._traced = TracedSteps(self.setup, recorder, device, is_settled)

    def enter(self, stack: ExitStack) -> None:
        """Let every training step pass through the parts: what is entered first is nearest to Megatron's step."""
        if self.setup.scheduler is not None:
            stack.enter_context(reductions_in_micro_ops(self.setup.scheduler))
        stack.enter_context(patches.observed_train_step(self._recorder.observe))
        stack.enter_context(patches.observed_train_step(self.setup.check_step))
        for part in (self._traced, self._profiling, self._tuner):
            if part is not None:
                stack.enter_context(patches.observed_train_step(part.observe))
        if self._tuner is not None:
            stack.enter_context(checkpoint_patches.checkpoint_arguments(self._tuner.take_from_checkpoint))

    def report(self) -> None:
        """The end of the run, unless its plan changed all the time for a profile. Collective over all ranks."""
        if self._profiling is not None:
            return
        report_overlap(self._recorder, self.setup, self._config.report_dir, self._traced, self._tuner, self._maker)
