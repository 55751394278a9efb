"""Kernels that torch has for CUDA only, computed on the CPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron_lancet.patching import replaced
from megatron_lancet.runtime import weight_grad_store


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


@contextmanager
def kernels_of_cuda() -> Iterator[None]:
    """Inside the context weight gradients use CUDA's GEMM that adds a product of bf16 to fp32."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("addmm.dtype_out", _addmm_into, "CPU")
    try:
        with replaced(weight_grad_store, "_has_gemm_into_fp32", lambda device_type: True):
            yield
    finally:
        library._destroy()
