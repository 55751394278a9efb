"""MXFP8: fp8 with a power of 2 (a byte that is its exponent, E8M0) per 32 elements of a row or of a column.

Source: ``MXFP8Quantizer`` in ``csrc/quantizer.cpp``, ``common/util/ptx.cuh``. Row-wise and column-wise data have the
same layout and other roundings. A GPU may keep scales in the order in which its GEMM reads them ("swizzled"); here they
always lie in the order of the blocks, because only the GEMM of this package reads them.
"""

from collections.abc import Sequence
from typing import Any

import torch

from tests.te_cpu.fp8.casting import from_fp8, largest, matrix, rounded_up, to_fp8

BLOCK = 32
_BIAS = 127


def create(quantizer: Any, shape: Sequence[int], dtype: torch.dtype) -> Any:
    """A tensor of the quantizer with nothing in it.

    Raises:
        RuntimeError: a dimension is no multiple of 32.
    """
    from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Tensor
    from transformer_engine.pytorch.tensor.storage.mxfp8_tensor_storage import MXFP8TensorStorage

    parts: dict[str, Any] = {
        **_new_buffers(quantizer, shape),
        "fp8_dtype": quantizer.dtype,
        "quantizer": quantizer,
        "with_gemm_swizzled_scales": quantizer.optimize_for_gemm,
    }
    if quantizer.internal:
        return MXFP8TensorStorage(**parts, fake_dtype=dtype)
    return MXFP8Tensor(shape=torch.Size(shape), dtype=dtype, **parts)


def _new_buffers(quantizer: Any, shape: Sequence[int]) -> dict[str, torch.Tensor | None]:
    columns = shape[-1]
    rows = int(torch.Size(shape[:-1]).numel())
    if columns % BLOCK or rows % BLOCK:
        raise RuntimeError(f"MXFP8 requires tensor dims that are divisible by {BLOCK} (got shape={list(shape)})")
    rowwise, columnwise = quantizer.rowwise_usage, quantizer.columnwise_usage

    def new(wanted: bool, *size: int) -> torch.Tensor | None:
        return torch.empty(size, dtype=torch.uint8) if wanted else None

    return {
        "rowwise_data": new(rowwise, *shape),
        "rowwise_scale_inv": new(rowwise, rounded_up(rows, 128), rounded_up(columns // BLOCK, 4)),
        "columnwise_data": new(columnwise, *shape),
        "columnwise_scale_inv": new(columnwise, rounded_up(rows // BLOCK, 4), rounded_up(columns, 128)),
    }


def quantize(tensor: torch.Tensor, quantizer: Any, output: Any) -> None:
    """Casts ``tensor`` into ``output``, which gets the buffers that the quantizer fills, and loses the others."""
    if quantizer.with_2d_quantization:
        raise NotImplementedError("MXFP8 with blocks of 32 rows and 32 columns has no stand-in on a CPU")
    for name, new in _new_buffers(quantizer, tensor.shape).items():
        if new is None or getattr(output, f"_{name}") is None:
            setattr(output, f"_{name}", new)
    output._fp8_dtype = quantizer.dtype
    output._with_gemm_swizzled_scales = quantizer.optimize_for_gemm
    if tensor.numel() == 0:
        return
    rows_MK = matrix(tensor)
    for usage, lines in (("rowwise", rows_MK), ("columnwise", rows_MK.t())):
        data = getattr(output, f"_{usage}_data")
        if data is None:
            continue
        blocks = lines.reshape(len(lines), -1, BLOCK)
        exponents = _exponents(blocks.abs().amax(dim=2) / largest(quantizer.dtype))
        cast = to_fp8(blocks * torch.exp2(_BIAS - exponents.float())[..., None], quantizer.dtype).view(lines.shape)
        if usage == "columnwise":
            cast, exponents = cast.t(), exponents.t()
        data.copy_(cast.reshape(data.shape))
        scale_inv = getattr(output, f"_{usage}_scale_inv")
        scale_inv.zero_()[: exponents.shape[0], : exponents.shape[1]] = exponents


def _exponents(values: torch.Tensor) -> torch.Tensor:
    """E8M0 bytes of the powers of 2 that are not smaller than fp32 values; 0 has the smallest, infinity the largest."""
    bits = values.view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    # Below 2^-126 the exponent is 0: up to half of it, that is 2^-127, which byte 0 stands for.
    is_above = (mantissa > 0) & (exponent != 254) & ~((exponent == 0) & (mantissa <= 0x400000))
    result = torch.where(torch.isinf(values), 254, exponent + is_above)
    return torch.where(torch.isnan(values), 255, result).to(torch.uint8)


def values(tensor: Any, rowwise: bool) -> torch.Tensor:
    """The fp32 matrix of row-wise or of column-wise data."""
    usage = "rowwise" if rowwise else "columnwise"
    data, scale_inv = getattr(tensor, f"_{usage}_data"), getattr(tensor, f"_{usage}_scale_inv")
    assert data is not None, f"this MXFP8 tensor has no {usage} data"
    rows_MK = matrix(from_fp8(data, tensor._fp8_dtype))
    scales = torch.exp2(scale_inv.float() - _BIAS).repeat_interleave(BLOCK, 1 if rowwise else 0)
    return rows_MK * scales[: rows_MK.shape[0], : rows_MK.shape[1]]
