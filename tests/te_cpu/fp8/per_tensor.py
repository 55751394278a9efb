"""fp8 with one scale per tensor: delayed and current scaling (``csrc/quantizer.cpp``, ``common/recipe``)."""

from collections.abc import Sequence
from typing import Any

import torch

from tests.te_cpu.dense import dense
from tests.te_cpu.fp8.casting import from_fp8, largest, matrix, scale_from_amax, to_fp8, transposed_shape


def _buffers(quantizer: Any) -> tuple[bool, bool]:
    """Whether a tensor of this quantizer has data, and whether it has their transpose.

    GEMMs before compute capability 10.0 take fp8 in one layout only, which the transpose is for.
    """
    from transformer_engine.pytorch.utils import is_non_tn_fp8_gemm_supported

    any_layout = is_non_tn_fp8_gemm_supported()
    return quantizer.rowwise_usage or any_layout, quantizer.columnwise_usage and not any_layout


def create(quantizer: Any, shape: Sequence[int], dtype: torch.dtype) -> Any:
    """A tensor of the quantizer with nothing in it."""
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor
    from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage

    has_data, has_transpose = _buffers(quantizer)
    parts = {
        "data": torch.empty(*shape, dtype=torch.uint8) if has_data else None,
        "fp8_scale_inv": torch.empty(1),
        "fp8_dtype": quantizer.dtype,
        "data_transpose": torch.empty(transposed_shape(shape), dtype=torch.uint8) if has_transpose else None,
        "quantizer": quantizer,
    }
    if quantizer.internal:
        return Float8TensorStorage(**parts, fake_dtype=dtype)
    return Float8Tensor(shape=torch.Size(shape), dtype=dtype, **parts)


def _prepare(quantizer: Any, output: Any, shape: torch.Size) -> None:
    """Gives a tensor the buffers that the quantizer fills, and takes the others."""
    has_data, has_transpose = _buffers(quantizer)
    if not has_data:
        output._data = None
    elif output._data is None:
        output._data = torch.empty(shape, dtype=torch.uint8)
    if not has_transpose:
        output._transpose = None
    elif output._transpose is None:
        output._transpose = torch.empty(transposed_shape(shape), dtype=torch.uint8)
    output._transpose_invalid = not has_transpose
    output._fp8_dtype = quantizer.dtype


def quantize(tensor: torch.Tensor, quantizer: Any, output: Any) -> None:
    """Casts ``tensor`` into ``output``.

    Raises:
        NotImplementedError: only the transpose is wanted, which Transformer Engine refuses, too.
    """
    _prepare(quantizer, output, tensor.shape)
    if tensor.numel() == 0:
        return
    if output._data is None:
        raise NotImplementedError("Columnwise-only per-tensor FP8 quantization is not implemented")
    amax = tensor.detach().abs().max().float()
    if type(quantizer).__name__ == "Float8Quantizer":
        # The cast takes the maximum with what is there: several casts between two updates share one history slot.
        quantizer.amax.copy_(torch.maximum(quantizer.amax, amax.reshape(quantizer.amax.shape)))
        scale = quantizer.scale.reshape(())
    else:
        scale = _current_scale(quantizer, amax)
    output._data.copy_(to_fp8(tensor.detach().float() * scale, quantizer.dtype).view(output._data.shape))
    if output._transpose is not None:
        fp8_transpose(output._data, quantizer.dtype, out=output._transpose)
    output._scale_inv.copy_(torch.reciprocal(scale))


def _current_scale(quantizer: Any, amax: torch.Tensor) -> torch.Tensor:
    if quantizer.with_amax_reduction:
        group = quantizer._canonicalized_amax_reduction_group()
        torch.distributed.all_reduce(amax, op=torch.distributed.ReduceOp.MAX, group=group)
    return scale_from_amax(
        amax, quantizer.dtype, quantizer.force_pow_2_scales, quantizer.amax_epsilon, largest(torch.float32)
    )


def values(tensor: Any, rowwise: bool) -> torch.Tensor:
    """The fp32 matrix of the data, or of their transpose where GEMMs need it and ``rowwise`` is False."""
    from transformer_engine.pytorch.utils import is_non_tn_fp8_gemm_supported

    if rowwise or is_non_tn_fp8_gemm_supported():
        assert tensor._data is not None, "this fp8 tensor has no row-wise data"
        return matrix(from_fp8(tensor._data, tensor._fp8_dtype)) * tensor._scale_inv
    assert tensor._transpose is not None, "this fp8 tensor has no transpose"
    assert not tensor._transpose_invalid, "the transpose of this fp8 tensor is older than its data"
    transpose = tensor._transpose.reshape(tensor._transpose.shape[0], -1)
    return from_fp8(transpose, tensor._fp8_dtype).t() * tensor._scale_inv


@dense("input", "out")
def fp8_transpose(input: torch.Tensor, dtype: int, *, out: torch.Tensor | None) -> torch.Tensor:
    """The bytes of a tensor, seen as a matrix of its last dimension, with this dimension first."""
    result = input.reshape(-1, input.shape[-1]).t().contiguous().reshape(transposed_shape(input.shape))
    return result if out is None else out.copy_(result.view(out.shape))


@dense("amax")
def compute_amax(input: torch.Tensor, amax: torch.Tensor) -> None:
    """Writes the largest absolute value of a tensor into ``amax``."""
    amax.copy_(input.detach().abs().max().reshape(amax.shape) if input.numel() else torch.zeros_like(amax))


@dense("amax_reduction_buffer", "amax_histories", "scales")
def fused_amax_and_scale_update_after_reduction(
    amax_reduction_buffer: torch.Tensor,
    amax_histories: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    amax_compute_algo: str,
    fp8_dtype: int,
    margin: float,
) -> None:
    """New scales from histories of amax [length, scales], whose first slot collects and is moved to the end.

    A tensor whose amax is 0 since the last update was not cast: its history stays.
    """
    if amax_compute_algo not in ("max", "most_recent"):
        raise ValueError(f"amax_compute_algo is {amax_compute_algo!r}, expected 'max' or 'most_recent'")
    reduced = amax_reduction_buffer.split([scale.numel() for scale in scales])
    for history, scale, own in zip(amax_histories, scales, reduced, strict=True):
        last = torch.where(own != 0, own, history[0])
        moved = torch.cat([history[1:], last[None]])
        largest_amax = moved.amax(dim=0) if amax_compute_algo == "max" else last
        was_cast = last != 0
        moved[0] = 0
        history.copy_(torch.where(was_cast, moved, history))
        usable = was_cast & torch.isfinite(largest_amax) & (largest_amax > 0)
        new = largest(fp8_dtype) * 2.0**-margin / largest_amax
        scale.copy_(torch.where(usable, new.clamp(max=largest(torch.float32)), scale))
