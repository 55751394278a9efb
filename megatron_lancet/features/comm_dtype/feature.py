"""``--lancet-comm-dtype``: whether a run's messages can be narrowed, and the notes for the user."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_lancet.config import LancetConfig
from megatron_lancet.errors import UsageError
from megatron_lancet.feature import ActiveFeature, Feature, RunFacts
from megatron_lancet.flags import CheckedFlags, flag, words
from megatron_lancet.schedule.comm_dtype import CommDtype
from megatron_lancet.schedule.plan import Plan
from megatron_lancet.training.run import Run

FLAG = "--lancet-comm-dtype"


@dataclass(frozen=True)
class CommDtypeFlags(CheckedFlags):
    """The format."""

    comm_dtype: CommDtype = flag(
        CommDtype.EXACT,
        same_on_all_ranks=True,
        unmodelled="messages carry hidden states as they are",
        **words(CommDtype),
        unchecked="",
        help="number format of hidden states in the all-to-alls of expert parallelism. exact (default): the type of "
        "the hidden states. fp8: 8 bits, with a scale for each 128, in forward dispatches, and bf16 in combines and "
        "gradients; it changes losses and gradients, and auto never chooses it.",
    )


class NarrowMessages(Feature):
    """``--lancet-comm-dtype``."""

    name = "comm_dtype"
    flags = CommDtypeFlags

    def needs_plan(self, config: LancetConfig) -> bool:
        """Whether messages are narrowed."""
        return config.of(CommDtypeFlags).comm_dtype is not CommDtype.EXACT

    def check(self, facts: RunFacts) -> None:
        """Refuses a format that would change nothing."""
        choose_comm_dtype(facts.args, facts.config, facts.plan)

    def note(self, facts: RunFacts) -> str:
        """Says that results are not stock's."""
        return comm_dtype_note(facts.config.of(CommDtypeFlags).comm_dtype)

    def start(self, run: Run) -> "ActiveCommDtype | None":
        """Narrows the run's messages."""
        return ActiveCommDtype(run.config.of(CommDtypeFlags).comm_dtype) if self.needs_plan(run.config) else None


class ActiveCommDtype(ActiveFeature):
    """A format in a run."""

    def __init__(self, comm_dtype: CommDtype) -> None:
        self._wire = comm_dtype

    def comm_settings(self) -> Mapping[str, Any]:
        """The format of messages."""
        return {"comm_dtype": self._wire}


def choose_comm_dtype(args: argparse.Namespace, config: LancetConfig, plan: Plan | None) -> CommDtype:
    """Returns the number format of hidden states in the run's messages.

    Args:
        args: Megatron's arguments, validated.
        plan: None for stock modules.

    Raises:
        UsageError: a format is given that would change nothing in this run.
    """
    comm_dtype = config.of(CommDtypeFlags).comm_dtype
    if comm_dtype is CommDtype.EXACT:
        return CommDtype.EXACT
    given = f"{FLAG} {comm_dtype}"
    if args.expert_model_parallel_size == 1:
        raise UsageError(
            f"{given} narrows the messages of expert parallelism, but --expert-model-parallel-size is 1 and none are "
            "sent. Drop the flag."
        )
    if plan is None:
        raise UsageError(
            f"{given} narrows the messages of the overlapping block, but this run has stock Megatron modules, whose "
            "all-to-alls stay as they are. Drop it, or --lancet-plan off."
        )
    return comm_dtype


def comm_dtype_note(comm_dtype: CommDtype) -> str:
    """The format's part of the plan's line; empty for the exact one."""
    if comm_dtype is CommDtype.EXACT:
        return ""
    return f"; comm_dtype={comm_dtype}: hidden states are rounded in messages, and losses and gradients are not stock's"


WIRE = NarrowMessages()
