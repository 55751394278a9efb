"""GEMMs: ``csrc/extensions/gemm.cpp``. Autograd does not record them, as it does not record kernels."""

from collections.abc import Sequence
from typing import Any

import torch

from tests.te_cpu.dense import dense
from tests.te_cpu.enums import torch_dtype
from tests.te_cpu.fp8.quantize import create_empty_quantized_tensor, is_quantized, quantize, values


@dense("A", "B", "D", "gelu_in", "workspace", "extra_output")
@torch.no_grad()
def generic_gemm(
    A: Any,
    transA: bool,
    B: Any,
    transB: bool,
    D: Any,
    quantizer: Any,
    output_dtype: int | None,
    bias: torch.Tensor | None,
    bias_type: int | None,
    gelu: bool,
    gelu_in: torch.Tensor | None,
    grad: bool,
    workspace: torch.Tensor | None,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    comm_overlap: Any = None,
    comm_type: Any = None,
    extra_output: torch.Tensor | None = None,
    bulk_overlap: bool = False,
    alpha: float = 1.0,
    beta: float | None = None,
) -> tuple[Any, torch.Tensor | None, None, torch.Tensor | None]:
    """D = alpha * op(B) @ op(A) + beta * D, in the words of row-major matrices.

    Fp8 operands are read in the layout that a GPU's GEMM reads: A transposed and B as it is are row-wise data.
    ``bias`` is added, or its gradient is the sum over the rows of B where ``grad``.

    Raises:
        NotImplementedError: a communication overlaps with it, or GELU is fused into it.
    """
    if comm_overlap is not None:
        raise NotImplementedError("a GEMM with userbuffers has no stand-in on a CPU")
    if gelu:
        raise NotImplementedError("a GEMM with GELU has no stand-in on a CPU")
    a, b = values(A, transA), values(B, not transB)
    left, right = (b.t() if transB else b), (a.t() if transA else a)
    dtype = torch_dtype(output_dtype) if output_dtype is not None else A.dtype
    shape = torch.Size([*(left.shape[:1] if transB else B.size()[:-1]), right.shape[1]])
    bias_grad = b.float().sum(dim=0).to(dtype) if bias is not None and grad else None
    if accumulate:
        assert quantizer is None, "fp8 outputs are not accumulated"
        assert bias is None or grad, "biases are not accumulated"
        value = _product(left, right, D.dtype, alpha, None, D, 1.0 if beta is None else beta)
    else:
        value = _product(left, right, dtype, alpha, None if grad else bias)
    value = value.view(shape)
    if quantizer is not None:
        is_fused = type(quantizer).__name__ == "Float8Quantizer" and (_is_per_tensor(A) or _is_per_tensor(B))
        out = D if D is not None else create_empty_quantized_tensor(quantizer, shape, dtype, None, False)
        quantize(value if is_fused else value.to(dtype), quantizer, out)
    else:
        out = value.to(dtype) if D is None else D.copy_(value.view(D.shape))
    return out, bias_grad, None, extra_output


def _product(
    left: torch.Tensor,
    right: torch.Tensor,
    dtype: torch.dtype,
    alpha: float,
    bias: torch.Tensor | None = None,
    addend: torch.Tensor | None = None,
    beta: float = 0.0,
) -> torch.Tensor:
    """alpha * left @ right + bias + beta * addend, in the widest of the types: a GPU sums in fp32 and rounds once."""
    computed = torch.promote_types(torch.promote_types(left.dtype, right.dtype), dtype)
    left, right = left.to(computed), right.to(computed)
    if addend is not None:
        return torch.addmm(addend.to(computed).view(len(left), -1), left, right, beta=beta, alpha=alpha)
    value = left @ right if alpha == 1.0 else alpha * (left @ right)
    return value if bias is None else value + bias.to(computed)


def _is_per_tensor(tensor: Any) -> bool:
    return is_quantized(tensor) and hasattr(tensor, "_scale_inv")


@dense("A", "B", "D", "bias", "pre_gelu_out", "workspace")
@torch.no_grad()
def te_general_grouped_gemm(
    A: Sequence[Any],
    transa: bool,
    B: Sequence[Any],
    transb: bool,
    D: Sequence[torch.Tensor] | None,
    D_type: int,
    m_splits: Sequence[int],
    bias: Sequence[torch.Tensor],
    bias_type: int,
    single_output: bool,
    pre_gelu_out: Sequence[torch.Tensor],
    grad: bool,
    workspace: Any,
    workspaceSize: int,
    accumulate: bool,
    use_split_accumulator: bool,
    math_sm_count: int,
) -> Sequence[torch.Tensor]:
    """One GEMM per group, into ``D``: a tensor each, or one for all. Returns biases, or their gradients.

    Raises:
        NotImplementedError: no outputs were given, or GELU is fused into it.
    """
    if D is None:
        raise NotImplementedError("a grouped GEMM that allocates its outputs has no stand-in on a CPU")
    if any(part.numel() for part in pre_gelu_out):
        raise NotImplementedError("a grouped GEMM with GELU has no stand-in on a CPU")
    outputs = D
    if single_output:
        rows = [torch.Size(b.size()[:-1]).numel() for b in B]
        outputs = D[0][: sum(rows)].split(rows)
    for a, b, output, own_bias in zip(A, B, outputs, bias, strict=True):
        if 0 in tuple(a.size()) or 0 in tuple(b.size()):
            if not accumulate:
                output.zero_()
            if grad:
                own_bias.zero_()
            continue
        used = own_bias if own_bias is not None and own_bias.numel() else None
        sizes = (None, 0, accumulate, use_split_accumulator)
        _, bias_grad, _, _ = generic_gemm(
            a, transa, b, transb, output, None, D_type, used, bias_type, False, None, grad, *sizes
        )
        if bias_grad is not None:
            own_bias.copy_(bias_grad)
    return bias


def get_num_cublas_streams() -> int:
    """Streams among which a grouped GEMM divides its groups."""
    return 1


def get_cublasLt_version() -> int:
    """New enough for every fp8 format."""
    return 130000


def get_cudnn_version() -> int:
    """New enough for every check."""
    return 91800
