"""The interface of optional features: a feature is one folder, and one line of the registry.

The core runs the plain plan and names no feature. The entry points of the command line take the features from
``registry.py`` and pass them to :func:`~megatron_lancet.training.arguments.parse`; from there they are in the run's
:class:`~megatron_lancet.config.LancetConfig`.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from megatron_lancet.feature_parts import PlanBlocker, PlanPart, ReadBatch, Samples, SmallLaunch
from megatron_lancet.flags import CheckedFlags

if TYPE_CHECKING:
    from megatron_lancet.config import LancetConfig
    from megatron_lancet.planning.profile import Profile
    from megatron_lancet.planning.search.search_space import Limits
    from megatron_lancet.schedule.dispatch import Dispatch
    from megatron_lancet.schedule.plan import Plan
    from megatron_lancet.schedule.reductions import GradientReduction


@dataclass(frozen=True)
class RunFacts:
    """A run before it starts; the same on all ranks.

    Attributes:
        args: Megatron's arguments, validated.
        plan: the fixed plan, or the fallback of a run that finds its plan; None for stock modules.
        plan_changes: whether the plan may change between two steps.
        device: device of this rank, a torch.device; None where it is not known, as in a dry run.
        is_dry_run: whether the run is only described, so that its files may be on another machine.
        status: this rank's :class:`~megatron_lancet.training.process.exit.RankStatus`, from :meth:`Feature.enter` on.
    """

    args: argparse.Namespace
    config: "LancetConfig"
    plan: "Plan | None"
    plan_changes: bool = False
    device: Any = None
    is_dry_run: bool = False
    status: Any = None


def message_sms(config: "LancetConfig") -> int | None:
    """Multiprocessors that a message of a run may take, at most; None where nothing bounds them."""
    return next((n for feature in config.features if (n := feature.message_sms(config)) is not None), None)


class ActiveFeature:
    """A feature in a run. Every method may be left out; all ranks call the same ones in the same order."""

    def observe(self, step: Callable[[], Any]) -> Any:
        """Runs a training step, with work before or after it that is not timed."""
        return step()

    def enter(self, stack: ExitStack) -> None:
        """Changes Megatron while it trains, for the length of ``stack``."""

    def comm_settings(self) -> Mapping[str, Any]:
        """Arguments of the model's :class:`~megatron_lancet.runtime.comm.Comm`."""
        return {}

    def model_settings(self) -> Mapping[str, Any]:
        """Further arguments of :func:`~megatron_lancet.model.gpt.overlap`."""
        return {}

    def check_ranks(self) -> None:
        """Compares the ranks before the model is built. Collective over all ranks.

        Raises:
            UsageError: they differ in what must be the same.
        """

    def prepare_stock(self, stages: Sequence[Any]) -> None:
        """Changes a model of stock modules before DDP wraps it."""

    def adopt(self, stages: Sequence[Any], comm: Any) -> None:
        """Changes the model when it is prepared for the plan, before DDP wraps it.

        Args:
            stages: this rank's pipeline stages, each a :data:`~megatron_lancet.model.gpt.LanguageModel`.
            comm: the stages' :class:`~megatron_lancet.runtime.comm.Comm`.
        """

    def num_tokens(self) -> int | None:
        """Tokens of all ranks in the step that has just run; None where every sample has ``--seq-length`` of them."""
        return None

    def is_steady(self) -> bool:
        """Whether later steps under the plan run as the next one does; the same on all ranks."""
        return True

    def summary(self) -> Mapping[str, Any]:
        """Plain values for ``report.json``. Collective over all ranks."""
        return {}

    def lines(self, report: Mapping[str, Any]) -> Sequence[str]:
        """Lines of the closing report, from the values in it; on rank 0."""
        return ()

    def write(self, folder: Path, steps: Any, report: Mapping[str, Any]) -> Sequence[Path]:
        """Writes files of ``--lancet-report`` on rank 0.

        Args:
            report: the content of ``report.json``.
            steps: the traced steps, a :class:`~megatron_lancet.report.timeline_record.TimelineRecord`; None if no step
                was traced.
        """
        return ()


class Steering(ActiveFeature):
    """Chooses the plan of each step of a run that overlaps. This one keeps the first plan.

    Its lines stand behind the plan's line in the report: how the plan was found.

    Attributes:
        writes_only: whether the run ends with a file and without a report.
        profile: the profile behind the plan, on rank 0; None without one.
        compared: steps under the plan and without overlap, a :class:`~megatron_lancet.report.compared.Compared`; None
            where no steps without overlap were measured.
    """

    writes_only = False

    @property
    def profile(self) -> "Profile | None":
        """See the class."""
        return None

    @property
    def compared(self) -> Any:
        """See the class."""
        return None

    def speed_up(self, report: Mapping[str, Any]) -> str:
        """The speed-up as the first sentence of the closing report, from the report's values."""
        return "the plan was fixed, so nothing was measured without overlap to compare it with"

    def is_settled(self) -> bool:
        """Whether the run has its final plan; the same on all ranks."""
        return True

    def step_changed(self) -> None:
        """Notes that steps under the final plan take another time from now on. Called at the same step on all ranks."""


class Feature:
    """An optional part of a run. Every method may be left out.

    Attributes:
        name: of its folder and of its page in docs.
        flags: its ``--lancet-*`` flags; None without any.
        report_files: names of the files that it writes for ``--lancet-report``.
    """

    name: ClassVar[str]
    flags: ClassVar[type[CheckedFlags] | None] = None
    report_files: ClassVar[tuple[str, ...]] = ()

    def change_parser(self, parser: argparse.ArgumentParser) -> None:
        """Changes Megatron's own flags."""

    def check_arguments(self, args: argparse.Namespace, config: "LancetConfig") -> None:
        """Checks Megatron's parsed arguments, before Megatron validates these.

        Raises:
            UsageError: a setting can't work.
        """

    def check_inputs(self, args: argparse.Namespace) -> None:
        """Checks files before Megatron reads them. Called again for arguments that Megatron has validated.

        Raises:
            UsageError: a file does not allow the run.
        """

    def normalize(self, args: argparse.Namespace, config: "LancetConfig") -> Iterator[str]:
        """Changes Megatron's parsed arguments before these are checked; yields a line for each change."""
        yield from ()

    def samples(self, args: argparse.Namespace, config: "LancetConfig") -> Samples | None:
        """Samples of another kind; None for Megatron's."""
        return None

    def batches(self, args: argparse.Namespace, config: "LancetConfig") -> ReadBatch | None:
        """Reads micro-batches that Megatron does not share out; None for Megatron's."""
        return None

    def shapes_vary(self, args: argparse.Namespace, has_plan: bool) -> bool:
        """Whether pipeline stages send each other hidden states in other shapes than Megatron expects.

        Args:
            has_plan: whether the layers are the overlapping ones.
        """
        return False

    def check_layers(self, args: argparse.Namespace, config: "LancetConfig") -> None:
        """Checks Megatron's arguments, which are validated, before a plan is chosen.

        Raises:
            UsageError: the layers do not support what the user asks for.
        """

    def check(self, facts: RunFacts) -> None:
        """Checks the run before any process group starts.

        Raises:
            UsageError: the run does not allow what the user asks for.
        """

    def prepare_built(self, args: argparse.Namespace, model: Any) -> None:
        """Changes a model that is built outside of a training run, before weights are loaded.

        Args:
            args: of the run that trained it.
            model: Megatron's language model.
        """

    def needs_plan(self, config: "LancetConfig") -> bool:
        """Whether the user asks for what stock modules don't have, so that a run does not fall back to these."""
        return False

    def missing_seams(self) -> Iterator[str]:
        """Yields what the feature uses of Megatron's internals, and this Megatron lacks."""
        yield from ()

    def changes_plan(self, args: argparse.Namespace, config: "LancetConfig") -> bool:
        """Whether the plan of a run that overlaps may change between two steps.

        Raises:
            UsageError: the run does not allow what the user asks for.
        """
        return False

    def announced(self, facts: RunFacts, line: str) -> "tuple[str, Limits | None]":
        """Called where the plan may change.

        Args:
            line: the fixed plan and its source.

        Returns:
            The line for the user, and the limits of the plans that may be found; None where the fixed plan stays.
        """
        return line, None

    def steer(self, run: Any, plan: "Plan") -> Steering | None:
        """Called before the model is built; what chooses the plan of each step, None where the feature does not.

        Args:
            run: :class:`~megatron_lancet.training.run.OverlappedRun`, whose setup and recorder are made.
            plan: the fixed plan.
        """
        return None

    def flags_for_overlap(self, config: "LancetConfig") -> Iterator[str]:
        """Yields the flags, with their values, that ask for what only a plan can have."""
        yield from ()

    def take_over(self, flags: Sequence[str], args: argparse.Namespace, config: "LancetConfig") -> str:
        """Called where a plan does what Megatron's own flags ask for.

        Args:
            flags: of Megatron; the arguments behind them are cleared.

        Returns:
            What the plan may do for them, as the end of a sentence; empty for nothing.
        """
        return ""

    def allows(self, dispatch: "Dispatch", config: "LancetConfig") -> bool:
        """Whether a fixed plan can have a dispatch and what the user asks of the feature."""
        return True

    def limited(self, limits: "Limits", args: argparse.Namespace, config: "LancetConfig") -> "Limits":
        """What a planner may choose in the run.

        Args:
            limits: what it may choose without the feature.

        Raises:
            UsageError: the run does not allow what the user asks for.
        """
        return limits

    def overlaps_whole(self, args: argparse.Namespace, config: "LancetConfig") -> bool:
        """Whether the feature overlaps whole micro-batches in a plan that is made without measurements.

        Such a plan then has no chunks, unless the user asks for some.
        """
        return False

    def in_fixed_plan(
        self, plan: "Plan", args: argparse.Namespace, config: "LancetConfig"
    ) -> "tuple[Plan, Sequence[str]]":
        """A plan that is made without measurements, and notes for the user.

        Args:
            plan: the plan without the feature.

        Raises:
            UsageError: the run does not allow what the user asks for.
        """
        return plan, ()

    def check_file(self, plan: "Plan", file: Path, args: argparse.Namespace, config: "LancetConfig") -> None:
        """Checks a plan that the user gives.

        Raises:
            UsageError: the run can't follow it.
        """

    def choices(self, limits: "Limits") -> str:
        """What a planner may choose within these limits, for the user; empty for nothing."""
        return ""

    def choice_notes(self, args: argparse.Namespace, config: "LancetConfig") -> Iterator[str]:
        """Yields lines on what a planner could choose if the user said more."""
        yield from ()

    def ranks_per_node(self, config: "LancetConfig") -> int | None:
        """Ranks of each node, if the user gives them."""
        return None

    def layout_blockers(self, args: argparse.Namespace) -> Iterator[str]:
        """Yields flags that a check on a few CPU ranks does not know."""
        yield from ()

    def shrink_axes(self, args: argparse.Namespace, axes: dict[str, int]) -> Iterator[str]:
        """Leaves out parallel axes of a check on a few CPU ranks; yields why.

        Args:
            axes: ranks of each axis, changed in place.
        """
        yield from ()

    def shrink(self, launch: SmallLaunch) -> None:
        """Adapts a launch to a check on a few CPU ranks."""

    def plan_blockers(self, part: PlanPart, args: argparse.Namespace, config: "LancetConfig") -> Iterator[PlanBlocker]:
        """Yields why a plan of the run can't have this part."""
        yield from ()

    def reduction(self, config: "LancetConfig", reduction: "GradientReduction") -> "GradientReduction":
        """How gradients are reduced, for the planner.

        Args:
            reduction: how they are reduced without the feature.
        """
        return reduction

    def message_sms(self, config: "LancetConfig") -> int | None:
        """Multiprocessors that a message may take, at most, for profiles and mocked links; None for no bound."""
        return None

    def note(self, facts: RunFacts) -> str:
        """The feature's part of the plan's line, from "; " on; empty for nothing."""
        return ""

    def missing_files(self, config: "LancetConfig") -> Iterator[str]:
        """Yields a line on each file of the run that is not on this machine, for a dry run."""
        yield from ()

    def announce(self, facts: RunFacts) -> Iterator[str]:
        """Yields log lines: what the feature does in this run."""
        yield from ()

    def enter(self, facts: RunFacts, stack: ExitStack) -> None:
        """Changes Megatron before it starts process groups, for the length of ``stack``."""

    def start(self, run: Any) -> ActiveFeature | None:
        """Joins a run before Megatron builds the model; None where it has nothing to do.

        Args:
            run: :class:`~megatron_lancet.training.run.StockRun` or
                :class:`~megatron_lancet.training.run.OverlappedRun`.
        """
        return None
