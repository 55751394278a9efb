"""The number of ranks that a dry run validates for."""

import argparse
import math
import os
from dataclasses import dataclass

from megatron_lancet.errors import UsageError

_WORLD_FLAG = "--lancet-world-size"


@dataclass(frozen=True)
class World:
    """The ranks that a dry run validates for.

    Attributes:
        num_ranks: at least 1.
        source: where the number comes from, for the user.
    """

    num_ranks: int
    source: str


def choose_world(args: argparse.Namespace) -> World:
    """Chooses the number of ranks by the flag, the environment or the script's parallel sizes.

    Raises:
        UsageError: a parallel size below 1.
    """
    if args.lancet_world_size is not None:
        return World(args.lancet_world_size, _WORLD_FLAG)
    if "WORLD_SIZE" in os.environ:
        return World(args.world_size, "WORLD_SIZE")
    return World(_fewest_ranks(args), f"the fewest that this layout allows; {_WORLD_FLAG} N validates for another")


def _fewest_ranks(args: argparse.Namespace) -> int:
    """The smallest number of ranks that the layout divides."""
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
