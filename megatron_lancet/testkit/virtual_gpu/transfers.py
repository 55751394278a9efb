"""Which tensors are the host's, and copies between host and GPU, where both are in the host's memory.

A tensor is the host's if it was made without a device, or pinned, or computed from such tensors only. It gets to the
GPU by ``cuda()`` or by ``to()`` another tensor's device, and back by ``cpu()``, ``tolist()``, ``numpy()`` or a copy.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from megatron_lancet.patching import around

if TYPE_CHECKING:
    from megatron_lancet.testkit.virtual_gpu.device import VirtualGpu

FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "rand", "randn", "randint", "arange", "linspace", "eye")
"""Functions of torch that make tensors on a device that is named."""


class Transfers:
    """Tells the host's tensors from the GPU's.

    Attributes:
        creates_on_host: whether the factory function that is running makes a tensor of the host.
    """

    def __init__(self, gpu: "VirtualGpu") -> None:
        self.creates_on_host = False
        self._gpu = gpu

    @contextmanager
    def explicit(self) -> Iterator[None]:
        """Inside the context factories and copies of torch say where their tensors are."""
        with ExitStack() as stack:
            for name in FACTORIES:
                stack.enter_context(around(torch, name, self._create))
            stack.enter_context(around(torch, "get_rng_state", self._on_host))
            for name in ("tolist", "numpy", "cpu"):
                stack.enter_context(around(torch.Tensor, name, self._look(name)))
            stack.enter_context(around(torch.Tensor, "cuda", lambda stock, tensor, *_, **__: self._to_gpu(tensor)))
            stack.enter_context(around(torch.nn.Module, "cuda", self._module_to_gpu))
            stack.enter_context(around(torch.Tensor, "to", self._to))
            yield

    def _create(self, stock: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        before = self.creates_on_host
        self.creates_on_host = bool(kwargs.get("pin_memory")) or device is None or device == "cpu"
        try:
            tensor = stock(*args, **kwargs)
            if self.creates_on_host:
                self._gpu.memory.mark_host(tensor)
        finally:
            self.creates_on_host = before
        return tensor

    def _on_host(self, stock: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = stock(*args, **kwargs)
        self._gpu.memory.mark_host(tensor)
        return tensor

    def _look(self, name: str) -> Callable[..., Any]:
        """The host waits before it looks at a tensor of the GPU, not at its own, which a copy may still fill."""

        def look(stock: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if self._gpu.is_watching:
                if not self._gpu.memory.is_host(tensor):
                    self._gpu.host_waits_for_stream(self._gpu.current_stream().id, name)
                self._gpu.host_reads(tensor, name)
            return stock(tensor, *args, **kwargs)

        return look

    def _to_gpu(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self._gpu.memory.is_host(tensor):
            return tensor
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=torch.device("cpu"))
        return copy.copy_(tensor, non_blocking=True)

    def _module_to_gpu(self, stock: Any, module: torch.nn.Module, *_: Any, **__: Any) -> torch.nn.Module:
        for tensor in (*module.parameters(), *module.buffers()):
            self._gpu.memory.allocation_of(tensor).is_host = False
        return module

    def _to(self, stock: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device", args[0] if args else None)
        moved = self._to_gpu(tensor) if isinstance(device, torch.device) and self._gpu.is_watching else tensor
        result: torch.Tensor = stock(moved, *args, **kwargs)
        return result
