"""The care of checkpoints in a run: the latest one is complete, a run goes on from it, and SIGTERM saves one."""

import argparse
from collections.abc import Iterator
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

    def start(self, run: Any) -> "ResumableOptimizer":
        """Lets any run resume its optimizer."""
        return ResumableOptimizer()


class ResumableOptimizer(ActiveFeature):
    """A run whose distributed optimizer can be resumed without apex and Transformer Engine."""

    def enter(self, stack: ExitStack) -> None:
        """Changes the optimizer."""
        stack.enter_context(resumable_distributed_optimizer())


CHECKPOINTS = CheckpointCare()
