"""What all fp8 formats share: scales from the largest absolute value, and casts that saturate.

Source: ``common/recipe/recipe_common.cuh`` and ``common/util/ptx.cuh`` of Transformer Engine.
"""

from collections.abc import Sequence

import torch

from tests.te_cpu.enums import torch_dtype


def largest(dtype: "torch.dtype | int") -> float:
    """Largest finite value of a data type."""
    return torch.finfo(torch_dtype(dtype)).max


def to_fp8(values: torch.Tensor, dtype: int) -> torch.Tensor:
    """Bytes of fp32 values rounded to the nearest fp8 value, ties to even; what is larger saturates, NaN stays."""
    limit = largest(dtype)
    return values.clamp(-limit, limit).to(torch_dtype(dtype)).view(torch.uint8)


def from_fp8(data: torch.Tensor, dtype: int) -> torch.Tensor:
    """The fp32 values of fp8 bytes."""
    return data.view(torch_dtype(dtype)).float()


def scale_from_amax(
    amax: torch.Tensor, dtype: int, power_of_2: bool, epsilon: float, value_for_inf: float
) -> torch.Tensor:
    """The factor that brings ``amax`` to the largest fp8 value.

    Args:
        amax: largest absolute values in fp32.
        dtype: of the fp8 values.
        power_of_2: rounds the scale down to a power of 2.
        epsilon: amax is at least this.
        value_for_inf: the scale where fp32 has none.
    """
    amax = torch.where(amax < epsilon, torch.full_like(amax, epsilon), amax)
    scale = largest(dtype) / amax
    scale = torch.where(torch.isinf(scale), torch.full_like(scale, value_for_inf), scale)
    if power_of_2:
        scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)  # its mantissa goes
    return torch.where((amax == 0) | ~torch.isfinite(amax), torch.ones_like(scale), scale)


def matrix(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as fp32 matrix of its last dimension."""
    return tensor.detach().reshape(-1, tensor.shape[-1]).float()


def num_blocks(length: int, block: int) -> int:
    """Blocks that cover ``length`` elements, the last one maybe in part."""
    return -(-length // block)


def rounded_up(length: int, multiple: int) -> int:
    """The smallest multiple that is not smaller."""
    return num_blocks(length, multiple) * multiple


def transposed_shape(shape: Sequence[int]) -> list[int]:
    """Shape of a tensor whose last dimension comes first."""
    return [shape[-1], *shape[:-1]] if len(shape) else []
