"""The kernels compiled for a device, which needs none: Triton's compiler starts an assembler."""

import inspect
import re
import subprocess

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.triton_kernels import ROW_SUMS, loaded_kernels


def _paced_copy(unit: int, is_aligned: bool) -> str:
    """PTX of the kernel of a paced link, which the assembler takes."""
    kernel = loaded_kernels(interpreted=False).paced_copy_kernel
    types = dict.fromkeys(inspect.signature(kernel.fn).parameters, "i64")
    types |= dict.fromkeys(("free_at", "state", "gave_up"), "*i64")
    types |= {"target": "*u8", "source": "*u8", "is_last": "i32", "max_spins": "i32", "UNIT": "constexpr"}
    aligned = ["free_at", "state", "gave_up", *(("target", "source") if is_aligned else ())]
    attributes = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(types) if name in aligned}
    source = ASTSource(fn=kernel, signature=types, constexprs={"UNIT": unit}, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 16})
    assert compiled.asm["cubin"], "the assembler takes it"
    return compiled.asm["ptx"]


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))


def test_paced_copy_loads_16_bytes_then_waits_then_stores(own_cache):
    ptx = _paced_copy(8, is_aligned=True)
    loads = [match.start() for match in re.finditer(r"ld\.global\.v2\.b64", ptx)]
    stores = [match.start() for match in re.finditer(r"st\.global\.v2\.b64", ptx)]
    clocks = [match.start() for match in re.finditer(r"%globaltimer", ptx)]
    assert len(loads) == len(stores) == 64 * 1024 // 16 // 512
    between = [clock for clock in clocks if max(loads) < clock < min(stores)]
    assert len(between) == 2, "one look, and one in the loop"
    assert not re.search(r"bar\.sync", ptx[min(loads) : max(stores)]), "warps of a piece do not wait for each other"
    for order in ("acq_rel.add", "relaxed.max.s64", "relaxed.add", "release.exch"):
        assert f"atom.global.gpu.{order}" in ptx


@pytest.mark.parametrize("unit", [8, 4, 2, 1])
def test_paced_copy_of_odd_addresses_moves_units(own_cache, unit):
    ptx = _paced_copy(unit, is_aligned=False)
    assert f"ld.global.b{8 * unit}" in ptx
    assert ".v2." not in ptx


@pytest.mark.parametrize(("unit", "is_aligned"), [(8, True), (8, False), (1, False)])
def test_paced_copy_spills_no_registers(own_cache, tmp_path, unit, is_aligned):
    path = tmp_path / "kernel.ptx"
    path.write_text(_paced_copy(unit, is_aligned))
    command = [triton.knobs.nvidia.ptxas.path, "-v", "-arch=sm_90a", str(path), "-o", str(tmp_path / "kernel.cubin")]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert "0 bytes spill stores, 0 bytes spill loads" in report
    assert int(re.search(r"Used (\d+) registers", report)[1]) * 512 <= 65536, "a block fits an SM"


@pytest.mark.parametrize(("dtype", "num_loads"), [("bf16", 1), ("fp32", 2)])
def test_sum_of_rows_loads_16_bytes_at_a_time(own_cache, dtype, num_loads):
    kernel = loaded_kernels(interpreted=False, name=ROW_SUMS).row_sum_kernel
    types = dict.fromkeys(inspect.signature(kernel.fn).parameters, "i32")
    types |= {"rows": f"*{dtype}", "sums": f"*{dtype}", "order": "*i64", "ends": "*i64", "BLOCK": "constexpr"}
    aligned = ("rows", "sums", "row_stride", "num_elements")
    attributes = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(types) if name in aligned}
    source = ASTSource(fn=kernel, signature=types, constexprs={"BLOCK": 1024}, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    assert compiled.asm["cubin"], "the assembler takes it"
    assert len(re.findall(r"ld\.global\.v4\.b32", compiled.asm["ptx"])) == num_loads
