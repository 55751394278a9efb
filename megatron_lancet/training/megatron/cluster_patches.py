"""Replaces inputs of Megatron's validation: the cluster in a dry run, CUDA's connections in a run with a plan.

It also leaves out the list of arguments that follows the validation.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from megatron.core import utils
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.transformer.moe import moe_utils
from megatron.training import arguments
from packaging.version import Version

from megatron_lancet.patching import around, replaced
from megatron_lancet.training.platform.cuda_connections import CONNECTIONS

_PERMUTATIONS = (
    "fused_permute",
    "fused_permute_with_probs",
    "fused_sort_chunks_by_index",
    "fused_sort_chunks_by_index_with_probs",
    "fused_unpermute",
)
"""Kernels of Transformer Engine whose presence Megatron checks."""


def any_number_of_connections() -> AbstractContextManager[None]:
    """Lets Megatron's validation accept any number of CUDA's connections with tensor or context parallelism.

    Megatron asserts one connection there, but not with its own overlap of all-to-alls, whose flag has other conditions.
    Validation alone reads one; the environment stays as it is, because the driver reads it when CUDA starts, which
    may happen during validation.
    """
    return replaced(arguments, "os", _OsWithOneConnection())


def no_list_of_arguments() -> AbstractContextManager[None]:
    """Keeps Megatron from printing all its arguments, 850 lines, after their validation."""
    return around(arguments, "_print_args", lambda stock, title, args: None)


class _OsWithOneConnection:
    """The module ``os``, except that in its ``environ`` CUDA has one connection. Only for reading."""

    def __init__(self) -> None:
        self.environ = {**os.environ, CONNECTIONS: "1"}

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


@contextmanager
def assumed_gpu(capability: tuple[int, int]) -> Iterator[None]:
    """Inside the context Megatron's checks find a GPU of this compute capability. It can't compute anything."""
    properties = SimpleNamespace(name="GPU", major=capability[0], minor=capability[1])
    with (
        replaced(torch.cuda, "get_device_capability", lambda *_: capability),
        replaced(torch.cuda, "get_device_properties", lambda *_: properties),
    ):
        yield


@contextmanager
def assumed_transformer_engine(version: Version) -> Iterator[None]:
    """Inside the context Megatron's checks find this Transformer Engine. Its kernels must not be called."""
    optimizers = ModuleType("transformer_engine.pytorch.optimizers")
    vars(optimizers)["FusedAdam"] = _FusedAdam
    assert optimizers.__name__ not in sys.modules
    with ExitStack() as stack:
        sys.modules[optimizers.__name__] = optimizers
        stack.callback(sys.modules.pop, optimizers.__name__)
        stack.enter_context(replaced(utils, "_te_version", version))
        stack.enter_context(replaced(rope_utils, "fused_apply_rotary_pos_emb", _never_called))
        for name in _PERMUTATIONS:
            stack.enter_context(replaced(moe_utils, name, _never_called))
        yield


class _FusedAdam:
    """The signature that Megatron looks for before it accepts a precision-aware optimizer."""

    def __init__(
        self, master_weight_dtype: Any, exp_avg_dtype: Any, exp_avg_sq_dtype: Any, use_decoupled_grad: Any
    ) -> None: ...


def _never_called(*_: Any, **__: Any) -> None:
    raise AssertionError("a dry run computes nothing")
