"""The graphs of a virtual GPU in a real training on the CPU, whose kernels else run at once."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch

from megatron_lancet.features.cuda_graphs.feature import CudaGraphs
from megatron_lancet.patching import around, replaced
from megatron_lancet.testkit.virtual_gpu.device import VirtualGpu
from megatron_lancet.testkit.virtual_gpu.graphs.pool import VirtualPool


@contextmanager
def platform_with_graphs(platform: Callable[[], AbstractContextManager[Any]]) -> Iterator[Any]:
    """Inside the context of the CPU's platform ``torch.cuda`` captures graphs, and a run may ask for them."""
    gpu = VirtualGpu()
    names = {
        "CUDAGraph": gpu.Graph,
        "graph": gpu.CurrentCapture,
        "graph_pool_handle": lambda: VirtualPool(gpu.memory),
        "Stream": gpu.Stream,
    }
    with platform() as found, ExitStack() as stack:
        for name, value in names.items():
            stack.enter_context(replaced(torch.cuda, name, value))
        stack.enter_context(
            around(CudaGraphs, "check", lambda stock, own, facts: stock(own, replace(facts, device=None)))
        )
        yield found
