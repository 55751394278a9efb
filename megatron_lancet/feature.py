"""What a run asks of its optional features: a feature is one folder, and one line of the registry.

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

from megatron_lancet.flags import CheckedFlags

if TYPE_CHECKING:
    from megatron_lancet.config import LancetConfig
    from megatron_lancet.schedule.plan import Plan


@dataclass(frozen=True)
class RunFacts:
    """A run before it starts; the same on all ranks.

    Attributes:
        args: Megatron's arguments, validated.
        plan: the fixed plan, or the fallback of a tuned run; None for stock modules.
        is_tuned: whether the run finds its plan while it trains.
    """

    args: argparse.Namespace
    config: "LancetConfig"
    plan: "Plan | None"
    is_tuned: bool = False


@dataclass(frozen=True)
class Samples:
    """Samples of another kind than those of Megatron's GPT data sets; their sizes differ.

    Attributes:
        dataset: class of Megatron's that reads them.
        num_samples: samples of a micro-batch.
        num_positions: positions of a sample, at most.
        number_set_by: what sets the number of samples, for messages.
    """

    dataset: type
    num_samples: int
    num_positions: int
    number_set_by: str


class ActiveFeature:
    """A feature in a run. Every method may be left out; all ranks call the same ones in the same order."""

    def observe(self, step: Callable[[], Any]) -> Any:
        """Runs a training step, with work before or after it that is not timed."""
        return step()

    def enter(self, stack: ExitStack) -> None:
        """Changes Megatron while it trains, for the length of ``stack``."""

    def adopt(self, stages: Sequence[Any], comm: Any) -> None:
        """Changes the model when it is prepared for the plan, before DDP wraps it.

        Args:
            stages: this rank's pipeline stages, each a :data:`~megatron_lancet.model.gpt.LanguageModel`.
            comm: the stages' :class:`~megatron_lancet.runtime.comm.Comm`.
        """

    def num_tokens(self) -> int | None:
        """Tokens of all ranks in the step that has just run; None where every sample has ``--seq-length`` of them."""
        return None

    def summary(self) -> Mapping[str, Any]:
        """Plain values for ``report.json``. Collective over all ranks."""
        return {}

    def lines(self, report: Mapping[str, Any]) -> Sequence[str]:
        """Lines of the closing report, from the values in it; on rank 0."""
        return ()

    def write(self, folder: Path, steps: Any) -> Sequence[Path]:
        """Writes files of ``--lancet-report`` on rank 0.

        Args:
            steps: the traced steps, a :class:`~megatron_lancet.report.timeline_record.TimelineRecord`; None if no step
                was traced.
        """
        return ()


class Feature:
    """An optional part of a run. Every method may be left out.

    Attributes:
        name: of its folder and of its page in docs.
        flags: its ``--lancet-*`` flags; None without any.
    """

    name: ClassVar[str]
    flags: ClassVar[type[CheckedFlags] | None] = None

    def change_parser(self, parser: argparse.ArgumentParser) -> None:
        """Changes Megatron's own flags."""

    def check_arguments(self, args: argparse.Namespace, config: "LancetConfig") -> None:
        """Checks Megatron's parsed arguments, before Megatron validates these.

        Raises:
            UsageError: a setting can't work.
        """

    def normalize(self, args: argparse.Namespace, config: "LancetConfig") -> Iterator[str]:
        """Changes Megatron's parsed arguments before these are checked; yields a line for each change."""
        yield from ()

    def samples(self, args: argparse.Namespace, config: "LancetConfig") -> Samples | None:
        """Samples of another kind; None for Megatron's."""
        return None

    def check(self, facts: RunFacts) -> None:
        """Checks the run before any process group starts.

        Raises:
            UsageError: the run does not allow what the user asks for.
        """

    def needs_plan(self, config: "LancetConfig") -> bool:
        """Whether the user asks for what stock modules don't have, so that a run does not fall back to these."""
        return False

    def note(self, facts: RunFacts) -> str:
        """What the line on the plan says of the feature, from "; " on; empty for nothing."""
        return ""

    def announce(self, facts: RunFacts) -> Iterator[str]:
        """Yields the lines that tell the user what the feature does in this run."""
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
