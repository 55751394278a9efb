"""CUDA's connections in a run: the loss of a plan with one, and Megatron's setting without a plan."""

import argparse

import torch

from megatron_lancet.config import LancetConfig
from megatron_lancet.training.plan.support import may_overlap
from megatron_lancet.training.platform.cuda_connections import CONNECTIONS, RECOMMENDED, has_one_connection


def wants_one_connection(args: argparse.Namespace, config: LancetConfig) -> bool:
    """Whether Megatron asserts one connection on GPUs before Blackwell.

    It does so with tensor or context parallelism, but neither with FSDP, which asserts the opposite, nor with its own
    overlap of all-to-alls. A plan is exempt as well, see ``any_number_of_connections``.

    Args:
        args: Megatron's arguments, validated or not.
    """
    is_parallel = args.tensor_model_parallel_size > 1 or args.context_parallel_size > 1
    has_fsdp = args.use_megatron_fsdp or args.use_torch_fsdp2
    is_exempt = args.overlap_moe_expert_parallel_comm or may_overlap(args, config)
    return bool(is_parallel and not has_fsdp and not is_exempt)


def one_connection_note(device: torch.device) -> str | None:
    """Describes what one connection costs a run with a plan; None if there are more, or no GPU."""
    if device.type != "cuda" or not has_one_connection():
        return None
    return (
        f"{CONNECTIONS} is 1: the GPU starts work in launch order, so in the forward pass the dispatch of a layer's "
        f"last chunk waits for another chunk's experts. Set it to {RECOMMENDED} before the launch; pretrain_gpt_moe.py "
        "accepts that with every layout (docs/gpus.md)"
    )
