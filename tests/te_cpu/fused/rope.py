"""Rotary position embedding: ``csrc/extensions/apply_rope.cpp``. Inputs may have strides; frequencies may not."""

import torch

from tests.te_cpu.dense import dense
from tests.te_cpu.enums import NVTE_QKV_Format


def _rotated(
    tensor: torch.Tensor, freqs: torch.Tensor, form: int, interleaved: bool, cp_size: int, backward: bool
) -> torch.Tensor:
    """Rotates the first channels of each head by its position's frequencies, or back; keeps the other channels."""
    name = NVTE_QKV_Format(int(form)).name
    if name not in ("NVTE_SBHD", "NVTE_BSHD") or cp_size > 1:
        raise NotImplementedError(f"fused RoPE of {name} tensors on {cp_size} ranks has no stand-in on a CPU")
    assert freqs.dim() == 4
    assert freqs.shape[1:3] == (1, 1), "all samples must have the same positions"
    assert freqs.dtype is torch.float32
    dim = 0 if name == "NVTE_SBHD" else 1
    assert tensor.size(dim) <= freqs.size(0), "every position needs frequencies"
    angles = freqs[: tensor.size(dim)]
    angles = angles if dim == 0 else angles.transpose(0, 1)
    channels = freqs.size(3)
    values = tensor[..., :channels].float()
    sine = angles.sin()
    turned = -_quarter(values * sine, interleaved) if backward else _quarter(values, interleaved) * sine
    return torch.cat([(values * angles.cos() + turned).to(tensor.dtype), tensor[..., channels:]], dim=-1)


def _quarter(values: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rotates pairs of channels by 90 degrees; the inverse rotation is the negative."""
    if interleaved:
        return torch.stack([-values[..., 1::2], values[..., ::2]], dim=-1).flatten(-2)
    first, second = values.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


@dense("freqs", "start_positions", "cu_seqlens")
def fused_rope_forward(
    input: torch.Tensor,
    freqs: torch.Tensor,
    start_positions: torch.Tensor | None,
    qkv_format: int,
    interleaved: bool,
    cu_seqlens: torch.Tensor | None,
    cp_size: int,
    cp_rank: int,
) -> torch.Tensor:
    """Rotates heads [s, b, h, d] or [b, s, h, d] by the frequencies [s or more, 1, 1, d or less]."""
    assert start_positions is None
    return _rotated(input, freqs, qkv_format, interleaved, cp_size, backward=False)


@dense("freqs", "start_positions", "cu_seqlens")
def fused_rope_backward(
    output_grads: torch.Tensor,
    freqs: torch.Tensor,
    start_positions: torch.Tensor | None,
    qkv_format: int,
    interleaved: bool,
    cu_seqlens: torch.Tensor | None,
    cp_size: int,
    cp_rank: int,
) -> torch.Tensor:
    """Returns the gradient of the input."""
    assert start_positions is None
    return _rotated(output_grads, freqs, qkv_format, interleaved, cp_size, backward=True)
