"""Gradient reductions of a run: the checks of ``--lancet-comm-priority``, and their description for the simulator."""

import argparse

import torch

from megatron_lancet.config import LancetConfig
from megatron_lancet.errors import UsageError
from megatron_lancet.schedule.plan import Plan
from megatron_lancet.schedule.reductions import CommPriority, GradientReduction, MicroOps, default_bucket_bytes


def choose_micro_ops(args: argparse.Namespace, config: LancetConfig, plan: Plan | None) -> MicroOps | None:
    """Chooses how gradient reductions are cut; None where Megatron runs them.

    Args:
        args: Megatron's arguments, validated.
        plan: None for stock modules.

    Raises:
        UsageError: another flag does not work with the priority.
    """
    if config.comm_priority is CommPriority.OFF:
        return None
    flag = f"--lancet-comm-priority {config.comm_priority}"
    if plan is None:
        raise UsageError(
            f"{flag} needs the overlapping block, but this run has stock Megatron modules: it was given --lancet-plan "
            f"off or has no expert parallelism (--expert-model-parallel-size is {args.expert_model_parallel_size}). "
            "Drop one of the two."
        )
    if not args.overlap_grad_reduce:
        raise UsageError(
            f"{flag} orders gradient reductions in the backward pass, but they run after it: pass "
            "--overlap-grad-reduce, or drop the flag."
        )
    num_instances = args.num_distributed_optimizer_instances
    for other, is_given in {
        "--ddp-reduce-scatter-with-fp32-accumulation": args.ddp_reduce_scatter_with_fp32_accumulation,
        f"--num-distributed-optimizer-instances {num_instances}": num_instances > 1,
    }.items():
        if is_given:
            raise UsageError(
                f"{other} does not work with {flag}: it changes how gradients are reduced. Drop one of the two."
            )
    return MicroOps(config.grad_chunk_bytes)


def reduction_of(args: argparse.Namespace, config: LancetConfig) -> GradientReduction | None:
    """Describes how a run with validated arguments reduces gradients in its backward pass; None if it does not."""
    if not args.overlap_grad_reduce or args.data_parallel_size == 1:
        return None
    wide = args.params_dtype is torch.float32 or args.accumulate_allreduce_grads_in_fp32
    element_bytes = (torch.float32 if wide else args.params_dtype).itemsize
    bucket_bytes = default_bucket_bytes(args.data_parallel_size) * element_bytes // torch.float32.itemsize
    if args.ddp_bucket_size is not None:
        bucket_bytes = args.ddp_bucket_size * element_bytes
    model_ranks = args.pipeline_model_parallel_size * (args.expert_tensor_parallel_size or 1)
    return GradientReduction(
        dense_ranks=args.data_parallel_size,
        expert_ranks=max(1, args.world_size // (model_ranks * args.expert_model_parallel_size)),
        priority=config.comm_priority,
        bucket_bytes=max(1, bucket_bytes),
        chunk_bytes=config.grad_chunk_bytes,
        is_scatter=args.use_distributed_optimizer,
        has_late_head=not args.untie_embeddings_and_output_weights,
    )
