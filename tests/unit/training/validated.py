"""Megatron's arguments that its validation derives from others, for tests that only parse."""

import argparse
import sys

import pytest


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


EXPERT_PARALLEL = (
    "--num-experts 8 --expert-model-parallel-size 2 --micro-batch-size 4 --seq-length 32 --transformer-impl local "
    "--moe-token-dispatcher-type alltoall --hidden-dropout 0 --attention-dropout 0"
)
"""A run that can overlap."""


def parsed(monkeypatch: pytest.MonkeyPatch, *words: object) -> argparse.Namespace:
    """Megatron's arguments for :data:`EXPERT_PARALLEL` with ``words`` behind it, as its validation leaves them."""
    from megatron.training.arguments import parse_args

    monkeypatch.setattr(sys, "argv", ["pretrain", *EXPERT_PARALLEL.split(), *map(str, words)])
    args = parse_args(ignore_unknown_args=True)
    set_as_validation_does(args)
    return args
