"""Environment variables that a run needs: those that Megatron asserts, in its validation or when it builds its model.

A launch script sets them, and a dry run on another machine may lack them. So a dry run validates as if they were set,
and names each one that is not. A value that the run would refuse is refused.
"""

import argparse
import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megatron_lancet.config import LancetConfig
from megatron_lancet.training.plan.connections import one_connection_note, wants_one_connection
from megatron_lancet.training.plan.support import may_overlap
from megatron_lancet.training.platform.cuda_connections import CONNECTIONS

_ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
_EXPANDABLE = "expandable_segments:True"


@dataclass(frozen=True)
class Variable:
    """A variable that must have a value.

    Attributes:
        reason: what asks for it, for the user.
    """

    name: str
    value: str
    reason: str


def needed_variables(args: argparse.Namespace, config: LancetConfig) -> Iterator[Variable]:
    """Yields the variables without which Megatron refuses these arguments, whether they are set or not.

    Args:
        args: Megatron's arguments, validated or not.
    """
    if wants_one_connection(args, config):
        reason = "without a plan Megatron needs it for tensor and context parallelism on GPUs before Blackwell"
        yield Variable(CONNECTIONS, "1", reason)
    if args.fine_grained_activation_offloading:
        reason = "--fine-grained-activation-offloading needs it with Transformer Engine 2.10 or newer"
        yield Variable("NVTE_CPU_OFFLOAD_V1", "1", reason)
    if args.cuda_graph_impl == "transformer_engine" and _EXPANDABLE in os.environ.get(_ALLOCATOR, ""):
        reason = f"--cuda-graph-impl transformer_engine needs it where {_ALLOCATOR} has {_EXPANDABLE}"
        yield Variable("NCCL_GRAPH_REGISTER", "0", reason)
    if _has_weight_shards(args) and args.cuda_graph_impl != "none":
        reason = "weight shards (--tensor-parallel-num-weight-shards) with CUDA graphs need it on Blackwell"
        yield Variable("CUDA_GRAPHS_USE_NODE_PRIORITY", "1", reason)


def _has_weight_shards(args: argparse.Namespace) -> bool:
    """Whether ranks share out the weights of a tensor-parallel rank; validation sets one shard for each rank of it."""
    tensor = args.tensor_model_parallel_size
    expert_tensor = args.expert_tensor_parallel_size or tensor
    num_shards, num_expert_shards = (
        args.tensor_parallel_num_weight_shards,
        args.expert_tensor_parallel_num_weight_shards,
    )
    return (num_shards or tensor) > tensor or (num_expert_shards or expert_tensor) > expert_tensor


def missing_variables(args: argparse.Namespace, config: LancetConfig) -> Iterator[str]:
    """Yields a message for each variable that the run needs and lacks, or that slows it down.

    Args:
        args: Megatron's arguments, validated.
    """
    for variable in needed_variables(args, config):
        if variable.name not in os.environ:
            yield f"{variable.name} is not set: set {variable.name}={variable.value}; {variable.reason}"
    note = one_connection_note(torch.device("cuda"))
    if note is not None and may_overlap(args, config):
        yield note
