"""Megatron's arguments that its validation derives from others, for tests that only parse."""

import argparse


def set_as_validation_does(args: argparse.Namespace, data_parallel_size: int = 2, num_micro_batches: int = 4) -> None:
    """Sets what the choice of a plan reads.

    Args:
        data_parallel_size: of a world that the test imagines.
        num_micro_batches: micro-batches of a step, where ``--global-batch-size`` does not say so.
    """
    args.expert_tensor_parallel_size = args.expert_tensor_parallel_size or 1
    args.virtual_pipeline_model_parallel_size = args.num_virtual_stages_per_pipeline_rank
    args.data_parallel_size = data_parallel_size
    if args.global_batch_size is None:
        args.global_batch_size = args.micro_batch_size * data_parallel_size * num_micro_batches
