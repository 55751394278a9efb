"""The cluster that a dry run validates for: its GPU, its packages and its environment.

Megatron asks which GPU and which packages there are before it accepts a flag; nothing is computed. Where this machine
can't tell, values are assumed; :func:`assumptions` lists them for the user.
"""

import importlib.util
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from packaging.version import Version

from megatron_lancet.training.megatron.cluster_patches import assumed_gpu, assumed_transformer_engine

_CAPABILITY = (9, 0)
"""Hopper: the GPU for which most public MoE scripts are written."""
_TRANSFORMER_ENGINE = Version("2.14.0")
"""Young enough for every flag of Megatron-Core 0.19."""
_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


def has_package(name: str) -> bool:
    """Whether a package could be imported here; nothing is imported."""
    return importlib.util.find_spec(name) is not None


def assumptions() -> list[str]:
    """Names the facts of the cluster that are assumed because this machine can't tell."""
    assumed = []
    if torch.cuda.device_count() == 0:
        assumed.append(f"compute capability {_CAPABILITY[0]}.{_CAPABILITY[1]}")
    if not has_package("transformer_engine"):
        assumed.append(f"Transformer Engine {_TRANSFORMER_ENGINE}")
    return assumed


@contextmanager
def on_the_cluster() -> Iterator[None]:
    """Inside the context Megatron's checks find the GPU and the packages of the cluster.

    The environment and torch's global settings are as before at its end, whatever Megatron's checks set there.
    """
    with ExitStack() as stack:
        if torch.cuda.device_count() == 0:
            stack.enter_context(assumed_gpu(_CAPABILITY))
        if not has_package("transformer_engine"):
            stack.enter_context(assumed_transformer_engine(_TRANSFORMER_ENGINE))
        stack.enter_context(_restored_environment())
        # Launch scripts export it; a dry run works without.
        os.environ.setdefault(_CONNECTIONS, "1")
        os.environ.setdefault("RANK", "0")
        yield


def missing_settings(args: Any) -> Iterator[str]:
    """Environment variables that the run needs and that are not set here. To be called outside the context."""
    parallel = args.tensor_model_parallel_size > 1 or args.context_parallel_size > 1
    if parallel and _CONNECTIONS not in os.environ:
        yield (
            f"{_CONNECTIONS} is not set: tensor and context parallelism need {_CONNECTIONS}=1 on GPUs before Blackwell"
        )


@contextmanager
def _restored_environment() -> Iterator[None]:
    environment, deterministic = dict(os.environ), torch.are_deterministic_algorithms_enabled()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        torch.use_deterministic_algorithms(deterministic)
