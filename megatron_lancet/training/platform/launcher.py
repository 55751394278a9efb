"""How many ranks each node has: from ``--lancet-ranks-per-node``, or from the environment that the launcher sets."""

import argparse
import os
import re

from megatron_lancet.config import LancetConfig
from megatron_lancet.errors import UsageError

FLAG = "--lancet-ranks-per-node"
MOCKED = "mock"
"""Value of Megatron's ``--distributed-backend`` with which one process plays all ranks; ``testkit/mock`` has it."""
_TASKS_PER_NODE = re.compile(r"(\d+)(\(x\d+\))?")
"""How SLURM writes equally many tasks on each node: ``8``, or ``8(x2)`` for two nodes."""


def is_mocked(args: argparse.Namespace) -> bool:
    """Whether the run asks for a mocked world."""
    return bool(args.distributed_backend == MOCKED)


def given_ranks_per_node(config: LancetConfig) -> int | None:
    """Ranks of each node as the user gives them; None if that is left to the launcher."""
    return next((n for feature in config.features if (n := feature.ranks_per_node(config)) is not None), None)


def ranks_per_node(args: argparse.Namespace, config: LancetConfig) -> int | None:
    """Ranks of each node; None if it is unknown, or nodes have unequal numbers of ranks.

    Args:
        args: Megatron's arguments, validated or not.

    Raises:
        UsageError: the flag does not divide the number of ranks.
    """
    given = given_ranks_per_node(config)
    if given is not None:
        if args.world_size % given:
            raise UsageError(
                f"{FLAG} {given} does not divide the {args.world_size} ranks of the run: every node "
                "has equally many. Pass the number of ranks that are started on each node, or drop the flag."
            )
        return given
    # A mocked world and a dry run are one process, for ranks that nobody has launched.
    if is_mocked(args) or args.world_size != _number("WORLD_SIZE"):
        return None
    of_torchrun = _number("LOCAL_WORLD_SIZE")
    number = of_torchrun if of_torchrun is not None else _tasks_per_node(args.world_size)
    if number is None or args.world_size % number:
        return None
    num_nodes = _number("GROUP_WORLD_SIZE") if of_torchrun is not None else None
    return number if num_nodes in (None, args.world_size // number) else None


def _number(variable: str) -> int | None:
    """A number above 0 from the environment; None if there is none."""
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() and int(text) > 0 else None


def _tasks_per_node(world_size: int) -> int | None:
    """SLURM's tasks on each node, if each task is a rank and nodes have equally many; None otherwise."""
    step, job = ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"), ("SLURM_NTASKS", "SLURM_NTASKS_PER_NODE")
    for tasks, per_node in (step, job):
        found = _TASKS_PER_NODE.fullmatch(os.environ.get(per_node, ""))
        if found is not None and _number(tasks) == world_size and int(found[1]) > 0:
            return int(found[1])
    return None
