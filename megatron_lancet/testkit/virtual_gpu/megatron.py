"""Megatron on a virtual GPU: the CUDA path of model, transport and DDP on a machine without one."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from megatron_lancet.patching import around
from megatron_lancet.registry import position_class
from megatron_lancet.runtime.weight_grad_store import DeferredWeight, WeightGradStore
from megatron_lancet.testkit.virtual_gpu.autograd import LeafStreams, leaf_streams
from megatron_lancet.testkit.virtual_gpu.device import VirtualGpu, virtual_gpu
from megatron_lancet.training.megatron.virtual_gpu_patches import around_ddp_hooks, own_copy_stream


@contextmanager
def virtual_gpu_platform(gpu: VirtualGpu | None = None) -> Iterator[VirtualGpu]:
    """Inside the context Megatron runs on a virtual GPU. Enter it inside ``cpu_platform()``.

    Args:
        gpu: the GPU; None for a new one.
    """
    with ExitStack() as stack:
        gpu = stack.enter_context(virtual_gpu(gpu))
        leaves = stack.enter_context(leaf_streams(gpu))
        stack.enter_context(own_copy_stream())
        stack.enter_context(position_class().on_threads(gpu.operators))
        stack.enter_context(around_ddp_hooks(leaves.hook))
        stack.enter_context(_marks_on_streams(gpu, leaves))
        yield gpu


@contextmanager
def _marks_on_streams(gpu: VirtualGpu, leaves: LeafStreams) -> Iterator[None]:
    """Our own hooks of accumulation nodes, whose gradients are undefined: they mark the last use of a weight."""
    streams: dict[int, Any] = {}

    def make_weight(stock: Callable[..., None], weight: DeferredWeight, *args: Any, **kwargs: Any) -> None:
        streams[id(weight)] = gpu.current_stream()
        stock(weight, *args, **kwargs)

    def mark_last_use(stock: Callable[..., None], store: WeightGradStore, weight: DeferredWeight) -> None:
        leaves.run_on(streams[id(weight)], lambda: stock(store, weight))

    with around(DeferredWeight, "__init__", make_weight), around(WeightGradStore, "mark_last_use", mark_last_use):
        yield
