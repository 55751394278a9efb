"""Kernels that torch has for CUDA only, computed on the CPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron_lancet.patching import replaced
from megatron_lancet.runtime import weight_grad_store
from megatron_lancet.runtime.rows import sums as row_sums


def _addmm_into(
    self: torch.Tensor,
    mat1: torch.Tensor,
    mat2: torch.Tensor,
    out_dtype: torch.dtype,
    *,
    beta: Any = 1,
    alpha: Any = 1,
    out: torch.Tensor,
) -> torch.Tensor:
    assert self.dtype == out.dtype == out_dtype
    return torch.addmm(self, mat1.to(out_dtype), mat2.to(out_dtype), beta=beta, alpha=alpha, out=out)


def _sum_rows(rows_nH: torch.Tensor, order_n: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Sums as ``sum_kernel.py``. Surplus rows are summed before the first place, and dropped."""
    places = torch.arange(len(order_n), device=ends.device)
    following_n = torch.searchsorted(ends, places, right=True)
    sums = torch.zeros((len(ends), rows_nH.size(1)), dtype=torch.float32, device=rows_nH.device)
    rows = rows_nH.index_select(0, order_n.clamp(max=len(rows_nH) - 1))
    return sums.index_add_(0, following_n, rows.float())[1:].to(rows_nH.dtype)


@contextmanager
def kernels_of_cuda() -> Iterator[None]:
    """Inside the context torch replaces the kernel for sums of rows and CUDA's GEMM that adds bf16 products to fp32."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("addmm.dtype_out", _addmm_into, "CPU")
    try:
        with (
            replaced(weight_grad_store, "_has_gemm_into_fp32", lambda device_type: True),
            replaced(row_sums, "sum_rows", _sum_rows),
        ):
            yield
    finally:
        library._destroy()
