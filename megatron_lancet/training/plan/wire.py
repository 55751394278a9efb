"""``--lancet-wire``: whether a run's messages can be narrowed, and what the user is told of it."""

import argparse

from megatron_lancet.config import LancetConfig
from megatron_lancet.errors import UsageError
from megatron_lancet.schedule.plan import Plan
from megatron_lancet.schedule.wire import Wire

FLAG = "--lancet-wire"


def choose_wire(args: argparse.Namespace, config: LancetConfig, plan: Plan | None) -> Wire:
    """Returns the number format of hidden states in the run's messages.

    Args:
        args: Megatron's arguments, validated.
        plan: None for stock modules.

    Raises:
        UsageError: a format is given that would change nothing in this run.
    """
    if config.wire is Wire.EXACT:
        return Wire.EXACT
    flag = f"{FLAG} {config.wire}"
    if args.expert_model_parallel_size == 1:
        raise UsageError(
            f"{flag} narrows the messages of expert parallelism, but --expert-model-parallel-size is 1 and none are "
            "sent. Drop the flag."
        )
    if plan is None:
        raise UsageError(
            f"{flag} narrows the messages of the overlapping block, but this run has stock Megatron modules, whose "
            "all-to-alls stay as they are. Drop it, or --lancet-plan off."
        )
    return config.wire


def wire_note(wire: Wire) -> str:
    """What the plan's line says of a format; empty for the exact one."""
    if wire is Wire.EXACT:
        return ""
    return f"; wire={wire}: hidden states are rounded in messages, and losses and gradients are not stock's"
