"""fp8 with one fp32 scale per block: of 128 elements along a line, or of 128 lines and 128 columns (DeepSeek-V3).

Source: ``Float8BlockQuantizer`` in ``csrc/quantizer.cpp``. Column-wise data are the transpose, with blocks along the
rows of the matrix. Scales of lines are stored with the blocks first: [blocks, lines], lines rounded up to 4.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import pad

from tests.te_cpu.fp8.casting import (
    from_fp8,
    largest,
    matrix,
    num_blocks,
    rounded_up,
    scale_from_amax,
    to_fp8,
    transposed_shape,
)

BLOCK = 128


def create(quantizer: Any, shape: Sequence[int], dtype: torch.dtype) -> Any:
    """A tensor of the quantizer with nothing in it."""
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockwiseQTensor
    from transformer_engine.pytorch.tensor.storage.float8_blockwise_tensor_storage import (
        Float8BlockwiseQTensorStorage,
    )

    parts: dict[str, Any] = {
        **_new_buffers(quantizer, shape),
        "fp8_dtype": quantizer.dtype,
        "quantizer": quantizer,
        "is_2D_scaled": quantizer.block_scaling_dim == 2,
    }
    if quantizer.internal:
        return Float8BlockwiseQTensorStorage(**parts, fake_dtype=dtype)
    return Float8BlockwiseQTensor(shape=torch.Size(shape), dtype=dtype, **parts)


def _new_buffers(quantizer: Any, shape: Sequence[int]) -> dict[str, torch.Tensor | None]:
    columns = shape[-1]
    rows = int(torch.Size(shape).numel()) // columns if columns else 0

    def scales(lines: int, length: int) -> torch.Tensor:
        if quantizer.block_scaling_dim == 2:
            return torch.empty(num_blocks(lines, BLOCK), rounded_up(num_blocks(length, BLOCK), 4))
        return torch.empty(num_blocks(length, BLOCK), rounded_up(lines, 4))

    rowwise, columnwise = quantizer.rowwise_usage, quantizer.columnwise_usage
    return {
        "rowwise_data": torch.empty(*shape, dtype=torch.uint8) if rowwise else None,
        "rowwise_scale_inv": scales(rows, columns) if rowwise else None,
        "columnwise_data": torch.empty(transposed_shape(shape), dtype=torch.uint8) if columnwise else None,
        "columnwise_scale_inv": scales(columns, rows) if columnwise else None,
    }


def quantize(tensor: torch.Tensor, quantizer: Any, output: Any) -> None:
    """Casts ``tensor`` into ``output``, which gets the buffers that the quantizer fills, and loses the others."""
    for name, new in _new_buffers(quantizer, tensor.shape).items():
        if new is None or getattr(output, f"_{name}") is None:
            setattr(output, f"_{name}", new)
    if tensor.numel() == 0:
        return
    rows_MK = matrix(tensor)
    limit = largest(tensor.dtype)
    for usage, lines in (("rowwise", rows_MK), ("columnwise", rows_MK.t())):
        data = getattr(output, f"_{usage}_data")
        if data is None:
            continue
        scale = _line_scales(lines, quantizer, limit)
        data.copy_(to_fp8(lines * _spread(scale, lines.shape), quantizer.dtype).view(data.shape))
        inverse = torch.reciprocal(scale)
        stored = inverse if quantizer.block_scaling_dim == 2 else inverse.t()
        scale_inv = getattr(output, f"_{usage}_scale_inv")
        scale_inv.zero_()[:, : stored.shape[1]] = stored


def _line_scales(lines: torch.Tensor, quantizer: Any, value_for_inf: float) -> torch.Tensor:
    """Scales [lines or blocks of lines, blocks along a line]."""
    height = BLOCK if quantizer.block_scaling_dim == 2 else 1
    num_lines, length = lines.shape
    full = pad(lines.abs(), (0, -length % BLOCK, 0, -num_lines % height))
    amax = full.view(len(full) // height, height, -1, BLOCK).amax(dim=(1, 3))
    return scale_from_amax(amax, quantizer.dtype, quantizer.force_pow_2_scales, quantizer.amax_epsilon, value_for_inf)


def _spread(scales: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """One scale per element, from scales [lines or blocks of lines, blocks along a line]."""
    if len(scales) != shape[0]:
        scales = scales.repeat_interleave(BLOCK, 0)[: shape[0]]
    return scales.repeat_interleave(BLOCK, 1)[:, : shape[1]]


def values(tensor: Any, rowwise: bool) -> torch.Tensor:
    """The fp32 matrix of row-wise or of column-wise data, which are rounded by other scales."""
    usage = "rowwise" if rowwise else "columnwise"
    data = getattr(tensor, f"_{usage}_data")
    assert data is not None, f"this block-scaled tensor has no {usage} data"
    lines = data.reshape(-1, data.shape[-1]) if rowwise else data.reshape(data.shape[0], -1)
    scale_inv = getattr(tensor, f"_{usage}_scale_inv")
    if tensor._is_2D_scaled:
        scales = scale_inv[:, : num_blocks(lines.shape[1], BLOCK)].repeat_interleave(BLOCK, 0)[: len(lines)]
    else:
        scales = scale_inv.t()[: len(lines)]
    result = from_fp8(lines, tensor._fp8_dtype) * _spread(scales, lines.shape)
    return result if rowwise else result.t()
