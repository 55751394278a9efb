"""Casts by a quantizer of Transformer Engine's Python, and what they are put together to."""

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from tests.te_cpu.dense import dense
from tests.te_cpu.enums import torch_dtype
from tests.te_cpu.fp8 import blockwise, mxfp8, per_tensor

_FORMATS = {
    "Float8Quantizer": per_tensor,
    "Float8CurrentScalingQuantizer": per_tensor,
    "Float8BlockQuantizer": blockwise,
    "MXFP8Quantizer": mxfp8,
}
_TENSORS = {
    "Float8Tensor": per_tensor,
    "Float8BlockwiseQTensor": blockwise,
    "MXFP8Tensor": mxfp8,
}


def _format_of(quantizer: Any) -> ModuleType:
    name = type(quantizer).__name__
    if name not in _FORMATS:
        raise NotImplementedError(f"{name} has no stand-in on a CPU")
    return _FORMATS[name]


def is_quantized(tensor: Any) -> bool:
    """Whether it is a tensor or a storage of Transformer Engine's Python."""
    return hasattr(tensor, "_quantizer")


def values(tensor: Any, rowwise: bool = True) -> torch.Tensor:
    """The matrix of a tensor, of its last dimension: in fp32 where it is quantized.

    Args:
        tensor: torch's or a quantized one.
        rowwise: reads row-wise data of a quantized tensor, else column-wise ones.
    """
    if not is_quantized(tensor):
        return tensor.reshape(-1, tensor.shape[-1])
    name = type(tensor).__name__.removesuffix("Storage")
    if name not in _TENSORS:
        raise NotImplementedError(f"{name} has no stand-in on a CPU")
    return _TENSORS[name].values(tensor, rowwise)


def create_empty_quantized_tensor(
    quantizer: Any, shape: Sequence[int], dtype: torch.dtype, device: Any, pin_memory: bool
) -> Any:
    """A tensor of a quantizer with nothing in it."""
    return _format_of(quantizer).create(quantizer, list(shape), dtype)


@dense("output", "noop")
def quantize(tensor: torch.Tensor, quantizer: Any, output: Any = None, noop: torch.Tensor | None = None) -> Any:
    """Casts a tensor, into ``output`` where there is one; ``noop`` that is not 0 leaves that as it is."""
    chosen = _format_of(quantizer)
    if output is None:
        output = chosen.create(quantizer, list(tensor.shape), tensor.dtype)
    if noop is None or noop.item() == 0:
        chosen.quantize(tensor, quantizer, output)
    return output


@dense("input")
def dequantize(input: Any, otype: int) -> torch.Tensor:
    """The values of a quantized tensor; of column-wise data where there are no other."""
    rowwise = getattr(input, "_data", getattr(input, "_rowwise_data", None)) is not None
    return values(input, rowwise).to(torch_dtype(otype)).reshape(tuple(input.size()))


def bgrad_quantize(input: torch.Tensor, quantizer: Any) -> list[Any]:
    """Gradient of a bias from the gradient of the output, and this one quantized."""
    bias_grad = input.reshape(-1, input.shape[-1]).float().sum(dim=0).to(input.dtype)
    return [bias_grad, input if quantizer is None else quantize(input, quantizer)]


def split_quantize(
    tensor: torch.Tensor,
    split_sections: Sequence[int],
    quantizer_list: Sequence[Any],
    disable_bulk_allocation: bool = False,
) -> list[Any]:
    """Casts each part of a tensor, split along its first dimension, by a quantizer of its own."""
    return multi_tensor_quantize(tensor.split(list(split_sections)), quantizer_list)


@dense("tensor_list")
def multi_tensor_quantize(tensor_list: Sequence[torch.Tensor], quantizer_list: Sequence[Any]) -> list[Any]:
    """Casts each tensor by a quantizer of its own."""
    return [quantize(tensor, quantizer) for tensor, quantizer in zip(tensor_list, quantizer_list, strict=True)]


@dense("tensor")
def swizzle_scales_for_gemm_(tensor: Any) -> None:
    """Says that scales are in the order of the GEMM, which here is the order that they have."""
    if hasattr(tensor, "_with_gemm_swizzled_scales"):
        tensor._with_gemm_swizzled_scales = True


@dense("tensors")
def multi_tensor_swizzle_scales_for_gemm_(tensors: Sequence[Any], rowwise_usage: bool, columnwise_usage: bool) -> None:
    """The same for several tensors."""
    for tensor in tensors:
        swizzle_scales_for_gemm_(tensor)


multi_tensor_swizzle_scales_for_gemm_unchecked_ = multi_tensor_swizzle_scales_for_gemm_
