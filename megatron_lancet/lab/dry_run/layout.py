"""The number of ranks that a dry run validates for, sizes of its process groups, and their checks."""

import argparse
import math
import os
from dataclasses import dataclass

from megatron_lancet.errors import UsageError

_WORLD_FLAG = "--lancet-world-size"


@dataclass(frozen=True)
class Layout:
    """Sizes of the process groups.

    Attributes:
        expert_data: ranks that hold the same experts.
        num_micro_batches: micro-batches of a step on each data-parallel rank.
        dense_shards: parts into which the distributed optimizer cuts the state of dense weights.
        expert_shards: parts into which it cuts the state of experts' weights.
    """

    num_ranks: int
    tensor: int
    pipeline: int
    virtual: int
    context: int
    expert: int
    expert_tensor: int
    data: int
    expert_data: int
    num_micro_batches: int
    dense_shards: int
    expert_shards: int


def choose_world(args: argparse.Namespace, launched: tuple[int, str] | None = None) -> tuple[int, str]:
    """Chooses the number of ranks from the flag, the launcher, the environment or the parallel sizes.

    Args:
        launched: the number that a launcher would start, and its source.

    Returns:
        The number, and its source for the user.

    Raises:
        UsageError: a parallel size is below 1.
    """
    if args.lancet_world_size is not None:
        return args.lancet_world_size, _WORLD_FLAG
    if launched is not None:
        return launched
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


def layout_of(args: argparse.Namespace, num_micro_batches: int) -> Layout:
    """Reads the sizes of the process groups from validated arguments."""
    expert, expert_tensor = args.expert_model_parallel_size, args.expert_tensor_parallel_size
    expert_data = args.world_size // (expert * expert_tensor * args.pipeline_model_parallel_size)
    instances, shards = args.num_distributed_optimizer_instances, args.use_distributed_optimizer
    return Layout(
        num_ranks=args.world_size,
        tensor=args.tensor_model_parallel_size,
        pipeline=args.pipeline_model_parallel_size,
        virtual=args.virtual_pipeline_model_parallel_size or 1,
        context=args.context_parallel_size,
        expert=expert,
        expert_tensor=expert_tensor,
        data=args.data_parallel_size,
        expert_data=expert_data,
        num_micro_batches=num_micro_batches,
        dense_shards=max(1, args.data_parallel_size * args.context_parallel_size // instances) if shards else 1,
        expert_shards=max(1, expert_data // instances) if shards else 1,
    )


def check_shares(args: argparse.Namespace, layout: Layout) -> None:
    """Checks sizes that Megatron checks only when it builds the model, or in the first step.

    Args:
        args: Megatron's arguments, validated.

    Raises:
        UsageError: a size is not divisible by its ranks, or the micro-batches do not fill the groups of virtual stages.
    """
    tensor = (args.tensor_model_parallel_size, "--tensor-model-parallel-size")
    sizes = [("--ffn-hidden-size", args.ffn_hidden_size, *tensor)]
    if args.num_experts:
        expert_tensor = (args.expert_tensor_parallel_size, "--expert-tensor-parallel-size")
        sizes.append(("--moe-ffn-hidden-size", args.moe_ffn_hidden_size, *expert_tensor))
        shared = args.moe_shared_expert_intermediate_size or 0
        sizes.append(("--moe-shared-expert-intermediate-size", shared, *tensor))
    if args.sequence_parallel:
        length = args.seq_length // args.context_parallel_size
        sizes.append(("the sequence on a rank (--seq-length / --context-parallel-size)", length, *tensor))
    for what, size, parts, by in sizes:
        if size % parts != 0:
            raise UsageError(f"{what} is {size}, which {by} of {parts} does not divide. Change one of them.")
    group = args.microbatch_group_size_per_vp_stage or layout.pipeline
    rest = layout.num_micro_batches % group
    if layout.virtual > 1 and group > layout.num_micro_batches:
        raise UsageError(
            f"--microbatch-group-size-per-virtual-pipeline-stage expects {layout.pipeline} to "
            f"{layout.num_micro_batches}, the micro-batches of a step; got {group}. Change it, or --global-batch-size."
        )
    if layout.virtual > 1 and (group < layout.pipeline or 0 < rest < layout.pipeline):
        raise UsageError(
            f"{layout.num_micro_batches} micro-batches a step do not fit the virtual pipeline stages: the last group "
            f"of at most {group} has {rest}, fewer than --pipeline-model-parallel-size {layout.pipeline}. Change "
            "--global-batch-size, or the number of ranks."
        )
