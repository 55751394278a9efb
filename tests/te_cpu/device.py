"""The device that Transformer Engine and Triton see on a CPU, next to what Megatron's CPU settings replace."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from triton.runtime import driver

from megatron_lancet.patching import around, replaced
from tests.te_cpu.attention import context_parallel_attention
from tests.te_cpu.permutation import permutation_in_torch


class InterpreterDriver:
    """Triton's driver of a device, as far as its interpreter asks: the fastest of several settings is any."""

    def get_benchmarker(self) -> Any:
        return lambda *_, **__: [0.0, 0.0, 0.0]

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, *_: Any) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


class DeviceGenerator:
    """The random state of the one device, which is torch's own on a CPU, with references to states as CUDA has them.

    ``graphsafe_set_state`` makes a :class:`torch.Generator` the device's state: what is drawn then advances it.
    """

    def __init__(self) -> None:
        self._current = torch.Generator()

    def get_state(self) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)

    def graphsafe_get_state(self) -> torch.Generator:
        self._current.set_state(torch.get_rng_state())
        return self._current

    def graphsafe_set_state(self, state: torch.Generator) -> None:
        self._current.set_state(torch.get_rng_state())
        self._current = state
        torch.set_rng_state(state.get_state())

    def clone_state(self) -> torch.Generator:
        clone = torch.Generator()
        clone.set_state(torch.get_rng_state())
        return clone


def _on_cpu(stock: Callable[..., torch.Tensor], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """``Tensor.to`` with the CPU as the device of CUDA."""

    def chosen(value: Any) -> Any:
        is_device = isinstance(value, str | torch.device) and str(value).startswith("cuda")
        return torch.device("cpu") if is_device else value

    return stock(tensor, *map(chosen, args), **{name: chosen(value) for name, value in kwargs.items()})


@contextmanager
def te_device(capability: tuple[int, int], interprets_triton: bool = False) -> Iterator[None]:
    """Inside :func:`cpu_platform`: every tensor is on the device, whose compute capability is this.

    Args:
        interprets_triton: Triton's interpreter runs the kernels of permutation, and not ``permutation.py``.
    """
    properties = SimpleNamespace(
        name="cpu", total_memory=0, major=capability[0], minor=capability[1], multi_processor_count=1
    )
    with ExitStack() as stack:
        stack.enter_context(replaced(torch.Tensor, "is_cuda", property(lambda self: True)))
        stack.enter_context(around(torch.Tensor, "to", _on_cpu))
        stack.enter_context(replaced(torch.cuda, "get_device_properties", lambda *_: properties))
        stack.enter_context(replaced(torch.cuda, "get_device_capability", lambda *_: capability))
        stack.enter_context(replaced(torch.version, "cuda", "13.0"))  # torch for CPUs has none
        stack.enter_context(replaced(torch.cuda, "default_generators", defaultdict(DeviceGenerator)))
        stack.enter_context(replaced(driver, "_active", InterpreterDriver()))
        stack.enter_context(context_parallel_attention())
        if not interprets_triton:
            stack.enter_context(permutation_in_torch())
        yield
