"""The flags of a dry run, and the number of ranks that it plays."""

import argparse
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_lancet.errors import UsageError

DRY_RUN_FLAG = "--lancet-dry-run"
_WORLD_FLAG = "--lancet-world-size"


@dataclass(frozen=True)
class World:
    """How many ranks a dry run validates for.

    Attributes:
        num_ranks: at least 1.
        source: who said so, for the user.
    """

    num_ranks: int
    source: str


def add_dry_run_arguments(group: argparse._ArgumentGroup) -> None:
    """Makes the parser know the flags."""
    group.add_argument(
        DRY_RUN_FLAG,
        action="store_true",
        help="parse and validate everything as for a cluster with GPUs, print model size, parallel layout, memory per "
        "GPU and plan, and end: one process, no GPU, no data needed. Files and packages that are missing here are "
        "warnings; what the run itself would refuse is an error.",
    )
    group.add_argument(
        _WORLD_FLAG,
        type=int,
        metavar="N",
        help=f"with {DRY_RUN_FLAG}: ranks to validate for. Default: WORLD_SIZE of the environment, else the fewest "
        "that the parallel sizes allow.",
    )


def is_dry_run(command_line: Sequence[str]) -> bool:
    """Whether a command line asks for a dry run; Megatron's parser takes no abbreviations."""
    return DRY_RUN_FLAG in command_line


def check_flags(args: argparse.Namespace) -> None:
    """
    Raises:
        UsageError: a number of ranks that can't be, or for a run that is none of ours.
    """
    if args.lancet_world_size is None:
        return
    if not args.lancet_dry_run:
        raise UsageError(
            f"{_WORLD_FLAG} {args.lancet_world_size} is for {DRY_RUN_FLAG}: a run gets its number of ranks from its "
            "launcher. Drop it."
        )
    if args.lancet_world_size < 1:
        raise UsageError(f"{_WORLD_FLAG} expects at least 1, got {args.lancet_world_size}.")


def choose_world(args: argparse.Namespace) -> World:
    """The number of ranks of a dry run, by the flag, the environment or the script's parallel sizes.

    Raises:
        UsageError: a parallel size below 1.
    """
    if args.lancet_world_size is not None:
        return World(args.lancet_world_size, _WORLD_FLAG)
    if "WORLD_SIZE" in os.environ:
        return World(args.world_size, "WORLD_SIZE")
    return World(_fewest_ranks(args), f"the fewest that this layout allows; {_WORLD_FLAG} N validates for another")


def _fewest_ranks(args: argparse.Namespace) -> int:
    """The smallest world that the layout divides."""
    sizes = {
        "--tensor-model-parallel-size": args.tensor_model_parallel_size,
        "--pipeline-model-parallel-size": args.pipeline_model_parallel_size,
        "--context-parallel-size": args.context_parallel_size,
        "--expert-model-parallel-size": args.expert_model_parallel_size,
        "--expert-tensor-parallel-size": args.expert_tensor_parallel_size or args.tensor_model_parallel_size,
    }
    for flag, size in sizes.items():
        if size < 1:
            raise UsageError(f"{flag} expects at least 1, got {size}.")
    tensor, pipeline, context, expert, expert_tensor = sizes.values()
    return pipeline * math.lcm(tensor * context, expert * expert_tensor)
