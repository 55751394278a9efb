"""Triton's kernels of the product, to be interpreted on a CPU or to be compiled for a device."""

import importlib.util
from types import ModuleType

import triton

MODULE = "megatron_lancet.model.local_experts.arrival_order"


def loaded_kernels(interpreted: bool) -> ModuleType:
    """A copy of the module: whether a kernel is interpreted is decided where it is defined."""
    spec = importlib.util.find_spec(MODULE)
    module = importlib.util.module_from_spec(spec)
    before = triton.knobs.runtime.interpret
    triton.knobs.runtime.interpret = interpreted
    try:
        spec.loader.exec_module(module)
    finally:
        triton.knobs.runtime.interpret = before
    return module
