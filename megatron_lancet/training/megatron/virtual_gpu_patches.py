"""Megatron's code for GPUs only, run on a virtual one: streams of DDP's hooks, compiled functions, copies of sizes."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.fusions import fused_bias_swiglu
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.transformer.moe import token_dispatcher

from megatron_lancet.patching import around, replaced

type Hook = Callable[..., None]


def around_ddp_hooks(wrap: Callable[[torch.nn.Parameter, Hook], Hook]) -> AbstractContextManager[None]:
    """Inside the context each hook that DDP registers at an accumulation node is ``wrap(parameter, hook)``."""

    def make(stock: Callable[..., Hook], ddp: Any, parameter: torch.nn.Parameter) -> Hook:
        hook = stock(ddp, parameter)
        if getattr(parameter, "skip_backward_post_hook", False):
            return hook  # the module that owns the parameter calls it
        return wrap(parameter, hook)

    return around(DistributedDataParallel, "_make_backward_post_hook", make)


def own_copy_stream() -> AbstractContextManager[None]:
    """Inside the context Megatron's dispatcher makes a stream for its copies anew: its class keeps the first one."""
    return replaced(token_dispatcher.MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream", None)


@contextmanager
def megatrons_kernels_of_a_gpu(
    run_as_one: Callable[[Callable[..., Any], Sequence[Any]], Any], rope: Callable[..., Any]
) -> Iterator[None]:
    """Inside the context Megatron's modules enqueue what they would on a GPU; ``run_as_one`` runs a function as one
    kernel, and ``rope`` takes the place of Transformer Engine's rotary embedding.
    """

    def compiled(stock: Callable[..., Any], *args: Any) -> Any:
        return run_as_one(stock, args)

    with ExitStack() as stack:
        stack.enter_context(replaced(token_dispatcher, "maybe_move_tensor_to_cpu", _moved_to_host))
        stack.enter_context(replaced(rope_utils, "fused_apply_rotary_pos_emb", rope))
        stack.enter_context(around(fused_bias_swiglu, "swiglu", compiled))  # torch.compile makes one kernel of each
        stack.enter_context(around(fused_bias_swiglu, "bias_swiglu", compiled))
        stack.enter_context(around(fused_bias_swiglu, "weighted_swiglu", compiled))
        stack.enter_context(around(fused_bias_swiglu, "swiglu_back", compiled))
        stack.enter_context(around(fused_bias_swiglu, "bias_swiglu_back", compiled))
        stack.enter_context(around(fused_bias_swiglu, "weighted_swiglu_back", compiled))
        yield


def _moved_to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Megatron's copy of split sizes on a GPU."""
    if not isinstance(tensor, torch.Tensor):
        return tensor
    on_host = tensor.to(torch.device("cpu"), non_blocking=True)
    return on_host.numpy() if as_numpy else on_host
