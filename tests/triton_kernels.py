"""Triton's kernels of the product, to be interpreted on a CPU or to be compiled for a device."""

import importlib.util
from types import ModuleType

import triton

ARRIVAL_ORDER = "megatron_lancet.model.local_experts.arrival_order"
PACED_COPY = "megatron_lancet.mock.paced_kernel"


def loaded_kernels(interpreted: bool, name: str = ARRIVAL_ORDER) -> ModuleType:
    """A copy of a module: whether a kernel is interpreted is decided where it is defined."""
    spec = importlib.util.find_spec(name)
    module = importlib.util.module_from_spec(spec)
    before = triton.knobs.runtime.interpret
    triton.knobs.runtime.interpret = interpreted
    try:
        spec.loader.exec_module(module)
    finally:
        triton.knobs.runtime.interpret = before
    return module
