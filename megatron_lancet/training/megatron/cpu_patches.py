"""Megatron on a CPU: changes that the stand-ins for ``torch.cuda`` in ``platform/cpu.py`` do not cover."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel import random as tensor_parallel_random
from megatron.core.transformer.moe import token_dispatcher
from megatron.training import training

# By name: the report counts calls of torch.distributed.all_to_all_single, and these are not expert parallelism's.
from torch.distributed import all_to_all_single as _all_to_all_single

from megatron_lancet.patching import around, replaced


@contextmanager
def megatron_on_cpu() -> Iterator[None]:
    """Inside the context Megatron uses torch's random state, and gathers of uneven parts work over gloo.

    Raises:
        AttributeError: Megatron lacks a name that is replaced here.
    """
    with (
        replaced(tensor_parallel_random, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state()),
        replaced(tensor_parallel_random, "_set_cuda_rng_state", lambda state, *_, **__: torch.set_rng_state(state)),
        around(token_dispatcher, "maybe_move_tensor_to_cpu", _split_sizes_as_ints),
        around(mappings, "_gather_along_first_dim", _gather_uneven),
        around(mappings, "_reduce_scatter_along_first_dim", _scatter_uneven),
        # Megatron would make this sum over the lengths of documents on the GPU of a number.
        replaced(training, "_seqlen_stats_in_iteration", torch.zeros(2, dtype=torch.float64)),
    ):
        yield


def _split_sizes_as_ints(stock: Any, tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Also converts CPU tensors, which Megatron leaves alone: all_to_all_single takes no tensor as split sizes."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def _gather_uneven(
    stock: Any, input_: torch.Tensor, group: Any, output_split_sizes: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """Megatron's all-gather along the first dimension, also of parts of different sizes, which gloo lacks."""
    if output_split_sizes is None or group.size() == 1:
        return stock(input_, group, output_split_sizes, *args, **kwargs)
    if not input_.is_contiguous():
        raise ValueError("Tensors must be contiguous")  # as NCCL does
    gathered = input_.new_empty((sum(output_split_sizes), *input_.shape[1:]))
    copies = torch.cat([input_] * group.size())
    _all_to_all_single(gathered, copies, list(output_split_sizes), [len(input_)] * group.size(), group=group)
    return gathered


def _scatter_uneven(
    stock: Any, input_: torch.Tensor, group: Any, input_split_sizes: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """Megatron's reduce-scatter along the first dimension, also to parts of different sizes, which gloo lacks."""
    if input_split_sizes is None or group.size() == 1:
        return stock(input_, group, input_split_sizes, *args, **kwargs)
    own_size = input_split_sizes[group.rank()]
    parts = input_.new_empty((group.size(), own_size, *input_.shape[1:]))
    sizes = [own_size] * group.size()
    _all_to_all_single(parts.flatten(0, 1), input_.contiguous(), sizes, list(input_split_sizes), group=group)
    return parts.sum(dim=0)
