"""The care of checkpoints in a run: the latest one is complete, a run goes on from it, and SIGTERM saves one."""

import argparse
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

from megatron_lancet.feature import ActiveFeature, Feature, RunFacts
from megatron_lancet.features.checkpoints.load_save import Checkpoints, check_before_start
from megatron_lancet.features.checkpoints.patches import (
    asked_to_stop,
    queue_lives_with_the_rank,
    resumable_distributed_optimizer,
)
from megatron_lancet.features.checkpoints.seams import missing_seams
from megatron_lancet.features.checkpoints.sigterm import StopRequest, saves_on_sigterm
from megatron_lancet.training.megatron import checkpoint_patches
from megatron_lancet.training.process.console import say

_PLAN = "lancet_plan_when_saved"
"""Name among Megatron's arguments; a text, so that stock can load it too."""
_OFF = "--lancet-plan off"


class CheckpointCare(Feature):
    """Checks and reports around Megatron's own checkpoints, with and without a plan."""

    name = "checkpoints"

    def missing_seams(self) -> Iterator[str]:
        """Yields what is changed of Megatron, and this Megatron lacks."""
        yield from missing_seams()

    def check_inputs(self, args: argparse.Namespace) -> None:
        """Refuses a checkpoint that is not complete."""
        check_before_start(args)

    def enter(self, facts: RunFacts, stack: ExitStack) -> None:
        """Watches what Megatron loads and saves, and lets SIGTERM save."""
        stack.enter_context(Checkpoints(facts.args).watched())
        if saves_on_sigterm(facts.args, facts.config):
            stop = StopRequest(facts.status, facts.device)
            stack.enter_context(asked_to_stop(stop, stop.begin))
        stack.enter_context(queue_lives_with_the_rank())

    def start(self, run: Any) -> "ResumableRun":
        """Lets any run resume."""
        return ResumableRun(run)


class ResumableRun(ActiveFeature):
    """A run that resumes, and says so where its plan is not the one before.

    Its distributed optimizer can be resumed without apex and Transformer Engine.
    """

    def __init__(self, run: Any) -> None:
        self._facts: RunFacts = run.facts
        self._setup = run.setup if run.facts.plan is not None else None
        self._plan: Any = None

    def enter(self, stack: ExitStack) -> None:
        """Changes the optimizer, and reads the plan of a checkpoint that Megatron loads."""
        stack.enter_context(resumable_distributed_optimizer())
        stack.enter_context(checkpoint_patches.checkpoint_arguments(self._compare))

    def observe(self, step: Callable[[], Any]) -> Any:
        """Keeps the plan among the arguments, which Megatron saves with each checkpoint."""
        if self._setup is None:
            setattr(self._facts.args, _PLAN, _OFF)
        elif self._setup.plan is not self._plan:
            self._plan = self._setup.plan
            setattr(self._facts.args, _PLAN, str(self._plan))
        return step()

    def _compare(self, saved_args: Any) -> None:
        before, now = getattr(saved_args, _PLAN, None), _OFF if self._facts.plan is None else str(self._facts.plan)
        if before not in (None, now) and not self._facts.plan_changes:
            say(
                f"Megatron-Lancet plan: the checkpoint was saved under {before}, and this run goes on under {now}: the "
                "same weights and optimizer, losses may differ by rounding"
            )


CHECKPOINTS = CheckpointCare()
