"""The cluster that a dry run validates for: its GPU, its packages and its environment.

Megatron checks flags against the GPU and the packages that it finds. If this machine has none, a dry run assumes
typical values of a cluster; :func:`assumptions` lists them for the user.
"""

import argparse
import importlib.util
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from packaging.version import Version

from megatron_lancet.config import LancetConfig
from megatron_lancet.lab.dry_run.environment import needed_variables
from megatron_lancet.planning.sizes.gpus import GPUS
from megatron_lancet.training.megatron.cluster_patches import assumed_gpu, assumed_transformer_engine
from megatron_lancet.training.platform.cuda_connections import CONNECTIONS

_BYTES_PER_GB = 1e9
_CAPABILITY = (9, 0)
"""Hopper, the GPU for which most public MoE scripts are written."""
_MEMORY_BYTES = GPUS["h100"].memory_bytes
_TRANSFORMER_ENGINE = Version("2.14.0")
"""New enough for every flag of Megatron-Core 0.19."""


def has_package(name: str) -> bool:
    """Whether a package can be imported here; it is not imported."""
    return importlib.util.find_spec(name) is not None


def gpu_memory_bytes(given_gb: float | None) -> float:
    """Memory of a GPU of the cluster: as given, else as this machine's GPU has it, else as assumed."""
    if given_gb is not None:
        return given_gb * _BYTES_PER_GB
    if torch.cuda.device_count() > 0:
        return torch.cuda.get_device_properties(0).total_memory
    return _MEMORY_BYTES


def assumptions(gpu_memory_gb: float | None = None) -> list[str]:
    """Properties of the cluster that are assumed, because this machine lacks them.

    Args:
        gpu_memory_gb: the memory of a GPU, where the user gives it.
    """
    assumed = []
    if torch.cuda.device_count() == 0:
        assumed.append(f"compute capability {_CAPABILITY[0]}.{_CAPABILITY[1]}")
        if gpu_memory_gb is None:
            assumed.append(f"{_MEMORY_BYTES / _BYTES_PER_GB:g} GB of memory")
    if not has_package("transformer_engine"):
        assumed.append(f"Transformer Engine {_TRANSFORMER_ENGINE}")
    return assumed


@contextmanager
def on_the_cluster(args: argparse.Namespace, config: LancetConfig) -> Iterator[None]:
    """Shows Megatron's checks the GPU and the packages of the cluster, and variables that the run needs as set.

    Args:
        args: Megatron's arguments, validated or not.

    At its end the context restores the environment and torch's global settings, which Megatron's checks change.
    """
    environment, deterministic = dict(os.environ), torch.are_deterministic_algorithms_enabled()
    with ExitStack() as stack:
        if torch.cuda.device_count() == 0:
            stack.enter_context(assumed_gpu(_CAPABILITY))
        if not has_package("transformer_engine"):
            stack.enter_context(assumed_transformer_engine(_TRANSFORMER_ENGINE))
        try:
            for variable in needed_variables(args, config):
                os.environ.setdefault(variable.name, variable.value)
            if not (args.use_megatron_fsdp or args.use_torch_fsdp2):
                os.environ.setdefault(CONNECTIONS, "1")  # set by launch scripts; a dry run works without it
            os.environ.setdefault("RANK", "0")
            yield
        finally:
            os.environ.clear()
            os.environ.update(environment)
            torch.use_deterministic_algorithms(deterministic)
