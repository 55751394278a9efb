"""Kernels compiled for a device, which needs none: Triton's compiler starts an assembler."""

import inspect
import re

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.triton_kernels import loaded_kernels


def test_a_device_gets_the_order_of_memory_that_counters_need(tmp_path, monkeypatch):
    """Compiled for a device, which needs none: rows are read behind an acquire, and products published by a release."""
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    kernel = loaded_kernels(interpreted=False)._multiply
    types = dict.fromkeys(inspect.signature(kernel.fn).parameters, "i32")
    types |= dict.fromkeys(("rows", "weights", "products"), "*bf16")
    types |= dict.fromkeys(("blocks", "arrived", "done", "late"), "*i32")
    sizes = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32}
    types |= dict.fromkeys(sizes, "constexpr")
    source = ASTSource(fn=kernel, signature=types, constexprs=sizes)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    assert compiled.asm["cubin"], "the assembler takes it"
    # In the loop: wait for the counter, multiply, store, publish. Only what names a late source is stored before.
    steps = re.findall(r"acquire|bar\.sync|wgmma\.mma_async|st\.global|release", compiled.asm["ptx"])
    acquire, release = len(steps) - steps[::-1].index("acquire"), steps.index("release")
    computing = [step for step in dict.fromkeys(steps[acquire:release]) if step != "bar.sync"]
    assert computing == ["wgmma.mma_async", "st.global"]
    assert steps[release - 1] == "bar.sync", "all threads have stored"
    assert steps.count("release") == 1
