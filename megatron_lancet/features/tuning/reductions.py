"""Gradient reductions of a run, described for the simulator."""

import argparse
from collections.abc import Sequence

import torch

from megatron_lancet.config import LancetConfig
from megatron_lancet.schedule.reductions import GradientReduction, default_bucket_bytes


def reduction_of(
    args: argparse.Namespace, config: LancetConfig, stages: Sequence[torch.nn.Module]
) -> GradientReduction | None:
    """Describes how a run with validated arguments reduces gradients in its backward pass; None if it does not.

    Args:
        stages: the model of a rank on the first pipeline stage, whose size ``--ddp-num-buckets`` divides.
    """
    if not args.overlap_grad_reduce:
        return None
    dense_ranks = args.data_parallel_size * args.context_parallel_size
    if dense_ranks == 1:
        return None
    wide = args.params_dtype is torch.float32 or args.accumulate_allreduce_grads_in_fp32
    element_bytes = (torch.float32 if wide else args.params_dtype).itemsize
    bucket_bytes = default_bucket_bytes(dense_ranks) * element_bytes // torch.float32.itemsize
    if args.ddp_bucket_size is not None:
        bucket_bytes = args.ddp_bucket_size * element_bytes
    if args.ddp_num_buckets is not None:
        num_parameters = sum(weight.numel() for stage in stages for weight in stage.parameters())
        bucket_bytes = num_parameters // args.ddp_num_buckets * element_bytes
    model_ranks = args.pipeline_model_parallel_size * (args.expert_tensor_parallel_size or 1)
    reduction = GradientReduction(
        dense_ranks=dense_ranks,
        expert_ranks=max(1, args.world_size // (model_ranks * args.expert_model_parallel_size)),
        bucket_bytes=max(1, bucket_bytes),
        is_scatter=args.use_distributed_optimizer,
        has_late_head=not args.untie_embeddings_and_output_weights,
    )
    for feature in config.features:
        reduction = feature.reduction(config, reduction)
    return reduction
