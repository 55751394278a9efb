"""``--lancet-wire``: whether a run's messages can be narrowed, and what the user is told of it."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_lancet.config import LancetConfig
from megatron_lancet.errors import UsageError
from megatron_lancet.feature import ActiveFeature, Feature, RunFacts
from megatron_lancet.flags import CheckedFlags, flag, words
from megatron_lancet.schedule.plan import Plan
from megatron_lancet.schedule.wire import Wire
from megatron_lancet.training.run import Run

FLAG = "--lancet-wire"


@dataclass(frozen=True)
class WireFlags(CheckedFlags):
    """The format."""

    wire: Wire = flag(
        Wire.EXACT,
        same_on_all_ranks=True,
        unmodelled="messages carry hidden states as they are",
        **words(Wire),
        unchecked="",
        help="number format of hidden states in the all-to-alls of expert parallelism. exact (default): the type of "
        "the hidden states. fp8: 8 bits, with a scale for each 128, in forward dispatches, and bf16 in combines and "
        "gradients; it changes losses and gradients, and auto never chooses it.",
    )


class NarrowWire(Feature):
    """``--lancet-wire``."""

    name = "wire"
    flags = WireFlags

    def needs_plan(self, config: LancetConfig) -> bool:
        """Whether messages are narrowed."""
        return config.of(WireFlags).wire is not Wire.EXACT

    def check(self, facts: RunFacts) -> None:
        """Refuses a format that would change nothing."""
        choose_wire(facts.args, facts.config, facts.plan)

    def note(self, facts: RunFacts) -> str:
        """Says that results are not stock's."""
        return wire_note(facts.config.of(WireFlags).wire)

    def start(self, run: Run) -> "ActiveWire | None":
        """Narrows the run's messages."""
        return ActiveWire(run.config.of(WireFlags).wire) if self.needs_plan(run.config) else None


class ActiveWire(ActiveFeature):
    """A format in a run."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def comm_settings(self) -> Mapping[str, Any]:
        """The format of messages."""
        return {"wire": self._wire}


def choose_wire(args: argparse.Namespace, config: LancetConfig, plan: Plan | None) -> Wire:
    """Returns the number format of hidden states in the run's messages.

    Args:
        args: Megatron's arguments, validated.
        plan: None for stock modules.

    Raises:
        UsageError: a format is given that would change nothing in this run.
    """
    wire = config.of(WireFlags).wire
    if wire is Wire.EXACT:
        return Wire.EXACT
    given = f"{FLAG} {wire}"
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
    return wire


def wire_note(wire: Wire) -> str:
    """What the plan's line says of a format; empty for the exact one."""
    if wire is Wire.EXACT:
        return ""
    return f"; wire={wire}: hidden states are rounded in messages, and losses and gradients are not stock's"


WIRE = NarrowWire()
