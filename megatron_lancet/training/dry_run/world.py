"""The number of ranks that a dry run validates for."""

import argparse
import math
import os

from megatron_lancet.errors import UsageError

_WORLD_FLAG = "--lancet-world-size"


def choose_world(args: argparse.Namespace) -> tuple[int, str]:
    """Chooses the number of ranks from the flag, the environment or the parallel sizes.

    Returns:
        The number, and its source for the user.

    Raises:
        UsageError: a parallel size is below 1.
    """
    if args.lancet_world_size is not None:
        return args.lancet_world_size, _WORLD_FLAG
    if "WORLD_SIZE" in os.environ:
        return args.world_size, "WORLD_SIZE"
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
    num_ranks = pipeline * math.lcm(tensor * context, expert * expert_tensor)
    return num_ranks, f"the fewest that this layout allows; {_WORLD_FLAG} N validates for another"
