"""A run with or without the overlap: its setup, the hooks around Megatron's training steps, and its report."""

import argparse
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta

import torch

from megatron_lancet.config import LancetConfig
from megatron_lancet.feature import ActiveFeature, RunFacts
from megatron_lancet.registry import position_class
from megatron_lancet.runtime.comm_stats import CommStats
from megatron_lancet.schedule.plan import Plan
from megatron_lancet.training.megatron import checkpoint_patches, patches
from megatron_lancet.training.megatron.patches import StepHook
from megatron_lancet.training.observe.run_report import report_overlap
from megatron_lancet.training.observe.step_recorder import StepRecorder
from megatron_lancet.training.observe.traced_steps import TracedSteps
from megatron_lancet.training.overlap_setup import NoOverlap, OverlapSetup
from megatron_lancet.training.plan.attention import uses_sdpa
from megatron_lancet.training.plan.select import choose_plan, is_tuned
from megatron_lancet.training.tuning.announcement import announced_plan
from megatron_lancet.training.tuning.autotune import AutoTune
from megatron_lancet.training.tuning.controller import TuningController, plan_without_overlap
from megatron_lancet.training.tuning.plan_maker import ProfilingPlanMaker
from megatron_lancet.training.tuning.profile_to_file import ProfileToFile


@dataclass(frozen=True)
class RunChoice:
    """How a run trains; the same on all ranks.

    Attributes:
        line: the plan and its source, for the user.
    """

    facts: RunFacts
    line: str

    @property
    def plan(self) -> Plan | None:
        """The fixed plan, or the fallback of a tuned run that is too short to find one; None for stock modules."""
        return self.facts.plan


def choose_run(args: argparse.Namespace, config: LancetConfig, device: torch.device) -> RunChoice:
    """Choose the plan of a run.

    Args:
        args: Megatron's arguments, validated.
        device: device of this rank.

    Raises:
        UsageError: the user asks for something that the run does not allow.
    """
    plan, line = choose_plan(args, config)
    line = announced_plan(args, config, plan, line)
    facts = facts_of_run(args, config, plan, device)
    check_features(facts)
    return RunChoice(facts, f"{line}{notes_of_features(facts)}")


def facts_of_run(
    args: argparse.Namespace, config: LancetConfig, plan: Plan | None, device: torch.device | None
) -> RunFacts:
    """The settings of a run with this plan that features may change.

    Args:
        device: device of this rank; None in a dry run.
    """
    tuned = plan is not None and is_tuned(args, config)
    return RunFacts(args, config, plan, tuned, device, is_dry_run=device is None)


def check_features(facts: RunFacts) -> None:
    """Checks all features of a run.

    Raises:
        UsageError: the run does not allow what the user asks for.
    """
    for feature in facts.config.features:
        feature.check(facts)


def notes_of_features(facts: RunFacts) -> str:
    """The features' parts of the plan's line."""
    return "".join(feature.note(facts) for feature in facts.config.features)


def enter_run(stack: ExitStack, choice: RunChoice, device: torch.device) -> "StockRun | OverlappedRun":
    """Change Megatron for the length of ``stack``, before it builds its model.

    Returns:
        The run. The caller makes its ``setup`` a hook of Megatron's model builder, and calls its ``report`` at the
        end; both are collective over all ranks.

    Raises:
        UsageError: the user asks for something that the run does not allow.
    """
    stack.enter_context(patches.sequence_parallel_with_torch_norm())
    stack.enter_context(patches.fused_core_attention(uses_sdpa(choice.facts.args, choice.facts.config)))
    stack.enter_context(patches.resumable_distributed_optimizer())
    run = StockRun(choice, device) if choice.plan is None else OverlappedRun(choice, choice.plan, device)
    run.enter(stack)
    return run


class Run:
    """The common parts of both kinds of runs.

    Attributes:
        facts: what was known before the run.
        config: its settings.
        device: device of this rank.
        stats: times and counts its all-to-alls.
        recorder: times the steps.
    """

    def __init__(self, choice: RunChoice, device: torch.device) -> None:
        self.facts, self.config, self.device = choice.facts, choice.facts.config, device
        num_kept = self.config.tune_steps
        self.stats = CommStats(device)
        self._features: list[ActiveFeature] = []
        self.recorder = StepRecorder(self.facts.args, device, self.stats, num_kept, self._features)

    def _start_features(self) -> None:
        """Lets features join the run, which must be complete otherwise."""
        started = (feature.start(self) for feature in self.config.features)
        self._features += [feature for feature in started if feature is not None]


class StockRun(Run):
    """A run of stock modules, whose steps and all-to-alls are timed. ``setup`` is a hook for Megatron's builder."""

    def __init__(self, choice: RunChoice, device: torch.device) -> None:
        super().__init__(choice, device)
        self.setup = NoOverlap(self._features)
        self._start_features()

    def enter(self, stack: ExitStack) -> None:
        """Change Megatron for the length of ``stack``."""
        stack.enter_context(patches.measured_stock_communication(self.stats))
        for feature in self._features:
            feature.enter(stack)
        hooks = [feature.observe for feature in self._features]
        stack.enter_context(patches.train_step_hooks([*hooks, self.recorder.observe]))

    def report(self) -> None:
        """Print and write the closing report. Collective over all ranks."""
        self.recorder.report(None, self.config.report_dir)


class OverlappedRun(Run):
    """A run of the overlapping block: under a fixed plan, while it is profiled, or while it finds its plan.

    ``setup`` is a hook for Megatron's model builder. The constructor raises a UsageError if the user asks for something
    that the run does not allow.

    Attributes:
        setup: the hook.
        traced: traces steps for the report; None without ``--lancet-report``.
        is_settled: returns whether the run has its final plan; the same on all ranks.
        makes_profile: whether the run only writes a profile.
    """

    def __init__(self, choice: RunChoice, plan: Plan, device: torch.device) -> None:
        super().__init__(choice, device)
        args, config = choice.facts.args, choice.facts.config
        self._choice = choice
        self._maker: ProfilingPlanMaker | None = None
        self._tuner: AutoTune | None = None
        self.traced: TracedSteps | None = None
        profiles = self.makes_profile = config.profile is not None
        self.setup = OverlapSetup(
            plan_without_overlap() if choice.facts.is_tuned else plan,
            device,
            self.stats,
            timedelta(minutes=args.distributed_timeout_minutes),
            sdpa=uses_sdpa(args, config),
            switchable=profiles or choice.facts.is_tuned,
            features=self._features,
            same_on_all_ranks=config.same_on_all_ranks(),
        )
        self._profile = ProfileToFile(args, config, self.setup, device) if profiles else None
        if choice.facts.is_tuned:
            controller = TuningController(config.tune_steps)
            self._maker = ProfilingPlanMaker(args, config, self.setup, device, controller.note)
            self._tuner = AutoTune(args, controller, self.setup, self.recorder, self._maker, plan, device)
        is_settled = self.is_settled = self._tuner.is_settled if self._tuner is not None else lambda: True
        if config.report_dir is not None and not profiles:
            self.traced = TracedSteps(self.setup, self.recorder, device, is_settled)
        self._start_features()

    def enter(self, stack: ExitStack) -> None:
        """Change Megatron for the length of ``stack``."""
        stack.enter_context(patches.dropped_outputs())
        stack.enter_context(position_class().steps(lambda: self.setup.stages))
        if self._tuner is not None:
            stack.enter_context(checkpoint_patches.checkpoint_arguments(self._tuner.take_from_checkpoint))
        for feature in self._features:
            feature.enter(stack)
        stack.enter_context(patches.train_step_hooks(self._step_hooks()))

    def _step_hooks(self) -> list[StepHook]:
        """The hooks around each training step, the outermost first.

        The tuner and the profile are outermost: they choose the step's plan before it begins, and read the others'
        records after it. The recorder is innermost: it times Megatron's step and none of the work around it.
        """
        parts = self._tuner, self._profile, self.traced, *self._features
        choosing = [part.observe for part in parts if part is not None]
        return [*choosing, self.setup.check_step, self.recorder.observe]

    def report(self) -> None:
        """Print and write the closing report, unless the run made a profile. Collective over all ranks."""
        if self._profile is None:
            found = self.traced, self._tuner, self._maker, self._features
            report_overlap(self.recorder, self.setup, self.config.report_dir, *found)
