"""Memory of a GPU during training: weights, gradients and optimizer are counted, activations estimated."""

import argparse
from dataclasses import dataclass

import torch

from megatron_lancet.lab.dry_run.activations import activation_bytes
from megatron_lancet.lab.dry_run.layout import Layout
from megatron_lancet.lab.dry_run.parameters import ModelSize
from megatron_lancet.lab.dry_run.stages import PipelineStage

_FP32_BYTES = 4


@dataclass(frozen=True)
class Memory:
    """Memory of a rank of one pipeline stage, in bytes.

    Attributes:
        optimizer: the optimizer's part on the GPU.
        offloaded: the optimizer's part in the host's memory.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    offloaded: float = 0.0

    @property
    def total(self) -> float:
        """Bytes on the GPU."""
        return self.weights + self.gradients + self.optimizer + self.activations


@dataclass(frozen=True)
class MemoryByWay:
    """Memory of a rank of each pipeline stage, by what runs the layers.

    Attributes:
        stock: Megatron's own modules.
        plan: a plan without pairs.
        paired: a plan with backwards beside forwards.
    """

    stock: list[Memory]
    plan: list[Memory]
    paired: list[Memory]

    def of(self, is_stock: bool, is_paired: bool) -> list[Memory]:
        """The memory of a run."""
        return self.stock if is_stock else self.paired if is_paired else self.plan


def memory_of_stages(
    args: argparse.Namespace,
    layout: Layout,
    stages: list[PipelineStage],
    size: ModelSize,
    saves_scores: bool,
    is_paired: bool = False,
    by_plan: bool = False,
) -> list[Memory]:
    """Memory of a rank of each pipeline stage.

    Args:
        args: Megatron's arguments, validated.
        saves_scores: whether core attention keeps its matrices of scores.
        is_paired: whether backwards are paired with forwards.
        by_plan: whether the layers run by a plan.
    """
    value = args.params_dtype.itemsize
    gradient = _FP32_BYTES if args.accumulate_allreduce_grads_in_fp32 else value
    state = optimizer_bytes_per_parameter(args)
    on_host = args.optimizer_offload_fraction if args.optimizer_cpu_offload else 0.0
    memory = []
    activations = activation_bytes(args, stages, layout.num_micro_batches, saves_scores, is_paired, by_plan)
    for held, kept in zip(size.held, activations, strict=True):
        optimizer = state * (held.dense / layout.dense_shards + held.expert / layout.expert_shards)
        on_gpu, offloaded = optimizer * (1 - on_host), optimizer * on_host
        memory.append(Memory(held.all * value, held.all * gradient, on_gpu, kept, offloaded))
    return memory


def optimizer_bytes_per_parameter(args: argparse.Namespace) -> float:
    """Bytes of fp32 weights and moments per parameter, before sharding; optimizers other than SGD count as Adam."""
    master = 0 if args.params_dtype == torch.float32 else args.main_params_dtype.itemsize
    is_split = args.main_params_dtype == torch.float32 and args.params_dtype == torch.bfloat16
    on_gpu = not args.optimizer_cpu_offload and not args.fp8_param_gather
    if args.use_precision_aware_optimizer and is_split and on_gpu:
        # Transformer Engine's Adam keeps only the bits of a fp32 master weight that the bf16 weight lacks.
        master -= args.params_dtype.itemsize
    if args.optimizer == "sgd":
        return master + (_FP32_BYTES if args.sgd_momentum else 0)
    return master + args.exp_avg_dtype.itemsize + args.exp_avg_sq_dtype.itemsize
