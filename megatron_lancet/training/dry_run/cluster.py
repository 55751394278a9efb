"""What Megatron's validation asks of the machine, answered for the cluster that a dry run is for.

Nothing here computes anything: Megatron asks which GPU and which packages there are before it accepts a flag. What is
assumed where this machine has no answer stands in :func:`assumptions`, for the user.
"""

import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from megatron.core import utils
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.transformer.moe import moe_utils
from packaging.version import Version

from megatron_lancet.patching import replaced

_CAPABILITY = (9, 0)
"""Hopper: the GPU for which most public MoE scripts are written."""
_TRANSFORMER_ENGINE = Version("2.14.0")
"""Young enough for every flag of Megatron-Core 0.19."""
_PERMUTATIONS = (
    "fused_permute",
    "fused_permute_with_probs",
    "fused_sort_chunks_by_index",
    "fused_sort_chunks_by_index_with_probs",
    "fused_unpermute",
)
"""Kernels of Transformer Engine whose presence Megatron checks."""
_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


def has_package(name: str) -> bool:
    """Whether a package could be imported here; nothing is imported."""
    return importlib.util.find_spec(name) is not None


def assumptions() -> list[str]:
    """What is taken for granted of the cluster because this machine can't tell."""
    assumed = []
    if torch.cuda.device_count() == 0:
        assumed.append(f"compute capability {_CAPABILITY[0]}.{_CAPABILITY[1]}")
    if not has_package("transformer_engine"):
        assumed.append(f"Transformer Engine {_TRANSFORMER_ENGINE}")
    return assumed


@contextmanager
def on_the_cluster() -> Iterator[None]:
    """Megatron's questions about GPU and packages get the cluster's answers inside the context.

    The environment and torch's global settings are as before at its end, whatever Megatron's checks set there.
    """
    with ExitStack() as stack:
        if torch.cuda.device_count() == 0:
            properties = SimpleNamespace(name="GPU", major=_CAPABILITY[0], minor=_CAPABILITY[1])
            stack.enter_context(replaced(torch.cuda, "get_device_capability", lambda *_: _CAPABILITY))
            stack.enter_context(replaced(torch.cuda, "get_device_properties", lambda *_: properties))
        if not has_package("transformer_engine"):
            _assume_transformer_engine(stack)
        stack.enter_context(_restored_environment())
        # Launch scripts export it; whoever only looks at one here need not.
        os.environ.setdefault(_CONNECTIONS, "1")
        os.environ.setdefault("RANK", "0")
        yield


def missing_settings(args: Any) -> Iterator[str]:
    """Environment variables that the run needs and that are not set here. To be asked outside the context."""
    parallel = args.tensor_model_parallel_size > 1 or args.context_parallel_size > 1
    if parallel and _CONNECTIONS not in os.environ:
        yield (
            f"{_CONNECTIONS} is not set: tensor and context parallelism need {_CONNECTIONS}=1 on GPUs before Blackwell"
        )


class _FusedAdam:
    """The signature that Megatron looks for before it accepts a precision-aware optimizer."""

    def __init__(
        self, master_weight_dtype: Any, exp_avg_dtype: Any, exp_avg_sq_dtype: Any, use_decoupled_grad: Any
    ) -> None: ...


def _assume_transformer_engine(stack: ExitStack) -> None:
    optimizers = ModuleType("transformer_engine.pytorch.optimizers")
    vars(optimizers)["FusedAdam"] = _FusedAdam
    assert optimizers.__name__ not in sys.modules
    sys.modules[optimizers.__name__] = optimizers
    stack.callback(sys.modules.pop, optimizers.__name__)
    stack.enter_context(replaced(utils, "_te_version", _TRANSFORMER_ENGINE))
    stack.enter_context(replaced(rope_utils, "fused_apply_rotary_pos_emb", _never_called))
    for name in _PERMUTATIONS:
        stack.enter_context(replaced(moe_utils, name, _never_called))


def _never_called(*_: Any, **__: Any) -> None:
    raise AssertionError("a dry run computes nothing")


@contextmanager
def _restored_environment() -> Iterator[None]:
    environment, deterministic = dict(os.environ), torch.are_deterministic_algorithms_enabled()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        torch.use_deterministic_algorithms(deterministic)
