"""Chooses between GPU and CPU, and adapts Megatron's arguments to a CPU."""

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from megatron_lancet.errors import UsageError
from megatron_lancet.training.plan.support import TRANSFORMER_ENGINE
from megatron_lancet.training.platform.cpu import cpu_platform, gpu_available
from megatron_lancet.training.platform.cuda_connections import CONNECTIONS
from megatron_lancet.training.platform.launcher import is_mocked

_CPU_SETTINGS = {
    "no_persist_layer_norm": True,
    "masked_softmax_fusion": False,
    "bias_gelu_fusion": False,
    "bias_swiglu_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "cross_entropy_loss_fusion": False,
    "moe_router_fusion": False,
    "use_flash_attn": False,
    "tp_comm_overlap": False,
    "use_te_activation_func": False,
}
"""Megatron's arguments that select CUDA kernels, with the values that select their plain counterparts."""

_LOW_PRECISION = {"fp8": "--fp8-format", "fp4": "--fp4-format"}
"""Arguments that need Transformer Engine's layers."""

_GPU_ONLY = {
    "use_megatron_fsdp": "--use-megatron-fsdp",
    "use_torch_fsdp2": "--use-torch-fsdp2",
    "cpu_offloading_num_layers": "--cpu-offloading-num-layers",
    "optimizer_cpu_offload": "--optimizer-cpu-offload",
    "use_precision_aware_optimizer": "--use-precision-aware-optimizer",
    "async_save": "--async-save",
    "nccl_ub": "--use-nccl-ub",
    "init_model_with_meta_device": "--init-model-with-meta-device",
}
"""Arguments that change results or memory use and have no counterpart on a CPU."""


@dataclass(frozen=True)
class Platform:
    """The device that this process computes on, with a line for the user that describes it."""

    device: torch.device
    description: str


@contextmanager
def platform() -> Iterator[Platform]:
    """Inside the context Megatron runs on this rank's GPU, or on the CPU where there is none."""
    if gpu_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        yield Platform(device, f"{torch.cuda.device_count()} GPU(s), NCCL")
        return
    # Stock Megatron asserts it with tensor or context parallelism; it orders CUDA launches, and there are none.
    os.environ[CONNECTIONS] = "1"
    with cpu_platform():
        layers = "Transformer Engine's layers if asked for" if has_transformer_engine() else "local layers"
        description = f"no GPU found: CPU with gloo, {layers}, unfused attention, norms and losses"
        yield Platform(torch.device("cpu"), description)


def has_transformer_engine() -> bool:
    """Whether Megatron could import Transformer Engine; the compiled one asks for a GPU."""
    from megatron.core.extensions import transformer_engine

    return bool(transformer_engine.HAVE_TE)


def apply_cpu_settings(args: argparse.Namespace) -> None:
    """Replace the settings that need a GPU by their plain counterparts, in place.

    Raises:
        UsageError: a setting has no counterpart.
    """
    from megatron.core.tensor_parallel import layers
    from megatron.core.transformer.enums import AttnBackend

    with_te = args.transformer_impl == TRANSFORMER_ENGINE and has_transformer_engine()
    for name, flag in (_GPU_ONLY if with_te else _LOW_PRECISION | _GPU_ONLY).items():
        if getattr(args, name):
            raise UsageError(f"{flag} needs a GPU, and this machine has none. Drop the flag to run on the CPU.")
    if args.cuda_graph_impl != "none" or args.enable_cuda_graph or args.external_cuda_graph:
        raise UsageError("CUDA graphs need a GPU, and this machine has none. Drop the --cuda-graph flags.")
    for name, value in _CPU_SETTINGS.items():
        assert hasattr(args, name), f"Megatron has no argument {name}"
        setattr(args, name, value)
    if not with_te:
        args.transformer_impl, args.moe_permute_fusion = "local", False
    # Transformer Engine's layers need nothing else for it, but Megatron's output layer has the same setting and needs
    # apex's extension.
    if not (with_te and layers._grad_accum_fusion_available):
        args.gradient_accumulation_fusion = False
    if not is_mocked(args):
        args.distributed_backend = "gloo"
    args.attention_backend = AttnBackend.unfused
