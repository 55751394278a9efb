"""The device that Transformer Engine and Triton see on a CPU, beside what Megatron's CPU settings replace."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from triton.runtime import driver

from megatron_lancet.patching import replaced


class _InterpreterDriver:
    """Triton's driver of a device, as far as its interpreter asks: the fastest of several settings is any."""

    def get_benchmarker(self) -> Any:
        return lambda *_, **__: [0.0, 0.0, 0.0]

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, *_: Any) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@contextmanager
def te_device(capability: tuple[int, int]) -> Iterator[None]:
    """Inside :func:`cpu_platform`: every tensor is on the device, whose compute capability is this."""
    properties = SimpleNamespace(
        name="cpu", total_memory=0, major=capability[0], minor=capability[1], multi_processor_count=1
    )
    with ExitStack() as stack:
        stack.enter_context(replaced(torch.Tensor, "is_cuda", property(lambda self: True)))
        stack.enter_context(replaced(torch.cuda, "get_device_properties", lambda *_: properties))
        stack.enter_context(replaced(torch.cuda, "get_device_capability", lambda *_: capability))
        stack.enter_context(replaced(torch.version, "cuda", "13.0"))  # torch for CPUs has none
        stack.enter_context(replaced(driver, "_active", _InterpreterDriver()))
        yield
