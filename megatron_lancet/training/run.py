"""A run with or without the overlap: its setup, the hooks around Megatron's training steps, and its report."""

import argparse
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from megatron_lancet.config import LancetConfig
from megatron_lancet.feature import ActiveFeature, RunFacts, Steering
from megatron_lancet.files.report_folder import (
    REPORT_FILES,
    cleared,
    training_counts_more,
)
from megatron_lancet.planning.search.search_space import Limits
from megatron_lancet.registry import position_class
from megatron_lancet.runtime.comm_stats import CommStats
from megatron_lancet.schedule.plan import Plan, plan_without_overlap
from megatron_lancet.training.megatron import patches
from megatron_lancet.training.megatron.patches import StepHook
from megatron_lancet.training.observe.run_report import report_overlap
from megatron_lancet.training.observe.step_recorder import StepRecorder
from megatron_lancet.training.observe.traced_steps import TracedSteps
from megatron_lancet.training.overlap_setup import NoOverlap, OverlapSetup
from megatron_lancet.training.plan.attention import uses_sdpa
from megatron_lancet.training.process.console import say


def facts_of_run(
    args: argparse.Namespace, config: LancetConfig, plan: Plan | None, device: torch.device | None
) -> RunFacts:
    """The settings of a run with this plan that features may change.

    Args:
        device: device of this rank; None in a dry run.
    """
    changes = plan is not None and any(feature.changes_plan(args, config) for feature in config.features)
    return RunFacts(args, config, plan, changes, device, is_dry_run=device is None)


def announced(facts: RunFacts, line: str) -> tuple[str, Limits | None]:
    """The plan of a run for the user, and the limits of the plans that it may find; None where it finds none.

    Args:
        line: the fixed plan and its source.
    """
    limits: Limits | None = None
    for feature in facts.config.features if facts.plan_changes else ():
        line, found = feature.announced(facts, line)
        limits = found or limits
    return line, limits


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


class Run:
    """The common parts of both kinds of runs.

    Attributes:
        facts: what was known before the run.
        config: its settings.
        device: device of this rank.
        stats: times and counts its all-to-alls.
        recorder: times the steps.
    """

    def __init__(self, facts: RunFacts) -> None:
        assert facts.device is not None
        self.facts, self.config, self.device = facts, facts.config, facts.device
        self.stats = CommStats(self.device)
        self._features: list[ActiveFeature] = []
        self.recorder = StepRecorder(facts.args, self.device, self.stats, self._features)

    def _start_features(self) -> None:
        """Lets features join the run, which must be complete otherwise."""
        started = (feature.start(self) for feature in self.config.features)
        self._features += [feature for feature in started if feature is not None]

    def report(self) -> None:
        """Print and write the closing report. Collective over all ranks."""
        names = [*REPORT_FILES, *(name for feature in self.config.features for name in feature.report_files)]
        folder = cleared(self.config.report_dir, names, say)
        with training_counts_more(folder):
            self._report_to(folder)

    def _report_to(self, folder: Path | None) -> None:
        raise NotImplementedError


class StockRun(Run):
    """A run of stock modules, whose steps and all-to-alls are timed. ``setup`` is a hook for Megatron's builder."""

    def __init__(self, facts: RunFacts) -> None:
        super().__init__(facts)
        self.setup = NoOverlap(self._features)
        self._start_features()

    def enter(self, stack: ExitStack, around_steps: Callable[..., Any]) -> None:
        """Change Megatron for the length of ``stack``; see :meth:`OverlappedRun.enter`."""
        stack.enter_context(patches.measured_stock_communication(self.stats))
        for feature in self._features:
            feature.enter(stack)
        hooks = [feature.observe for feature in self._features]
        stack.enter_context(around_steps([*hooks, self.recorder.observe]))

    def _report_to(self, folder: Path | None) -> None:
        self.recorder.report(None, folder)


class OverlappedRun(Run):
    """A run of the overlapping block, under a fixed plan or under plans that change between two steps.

    ``setup`` is a hook for Megatron's model builder. The constructor raises a UsageError if the user asks for something
    that the run does not allow.

    Attributes:
        setup: the hook.
        steering: chooses the plan of each step.
        traced: traces steps for the report; None without ``--lancet-report``.
    """

    def __init__(self, facts: RunFacts) -> None:
        super().__init__(facts)
        args, config, plan, device = facts.args, facts.config, facts.plan, self.device
        assert plan is not None
        self.traced: TracedSteps | None = None
        changes = facts.plan_changes
        self.setup = OverlapSetup(
            plan_without_overlap() if changes else plan,
            device,
            self.stats,
            timedelta(minutes=args.distributed_timeout_minutes),
            sdpa=uses_sdpa(args, config),
            switchable=changes,
            features=self._features,
            same_on_all_ranks=config.same_on_all_ranks(),
        )
        steering = (feature.steer(self, plan) for feature in config.features)
        self.steering = next((one for one in steering if one is not None), Steering())
        if config.report_dir is not None and not self.steering.writes_only:
            self.traced = TracedSteps(self.setup, self.recorder, device, self.is_settled)
        self._start_features()

    def enter(self, stack: ExitStack, around_steps: Callable[..., Any]) -> None:
        """Change Megatron for the length of ``stack``.

        Args:
            around_steps: puts hooks, which it takes as a list, around each training step; returns a context.
        """
        stack.enter_context(patches.dropped_outputs())
        stack.enter_context(position_class().steps(lambda: self.setup.stages))
        self.steering.enter(stack)
        for feature in self._features:
            feature.enter(stack)
        stack.enter_context(around_steps(self._step_hooks()))

    def _step_hooks(self) -> list[StepHook]:
        """The hooks around each training step, the outermost first.

        The steering is outermost: it chooses the step's plan before it begins, and reads the others' records after it.
        The trace and the recorder are innermost: they cover Megatron's step alone, and no capture of graphs before it.
        """
        parts = self.steering, *self._features, self.traced
        choosing = [part.observe for part in parts if part is not None]
        return [*choosing, self.setup.check_step, self.recorder.observe]

    def is_settled(self) -> bool:
        """Whether the run has its final plan; the same on all ranks."""
        return self.steering.is_settled()

    def report(self) -> None:
        """Print and write the closing report, unless the run only writes a file or has no model. Collective."""
        if self.setup.stages and not self.steering.writes_only:
            super().report()

    def _report_to(self, folder: Path | None) -> None:
        report_overlap(self.recorder, self.setup, folder, self.traced, self.steering, self._features)
