"""LayerNorm and RMSNorm, computed in fp32: ``csrc/extensions/normalization.cpp``."""

from typing import Any

import torch

from tests.te_cpu.dense import dense
from tests.te_cpu.enums import torch_dtype
from tests.te_cpu.fp8.quantize import quantize


def _gamma(weight: torch.Tensor, zero_centered: bool) -> torch.Tensor:
    return weight.float() + (1 if zero_centered else 0)


def _output(value: torch.Tensor, out: Any, quantizer: Any, otype: int) -> Any:
    value = value.to(torch_dtype(otype))
    if quantizer is not None:
        return quantize(value, quantizer, out)
    return value if out is None else out.copy_(value)


@dense("input", "weight", "bias", "ln_out")
def layernorm_fwd(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    ln_out: Any,
    quantizer: Any,
    otype: int,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """LayerNorm of rows with its output, means and reciprocal standard deviations."""
    rows = input.float()
    mean = rows.mean(dim=-1)
    rsigma = torch.rsqrt(rows.var(dim=-1, unbiased=False) + eps)
    value = (rows - mean[..., None]) * rsigma[..., None] * _gamma(weight, zero_centered_gamma)
    if bias is not None:
        value = value + bias.float()
    return _output(value, ln_out, quantizer, otype), mean.flatten(), rsigma.flatten()


def layernorm_bwd(
    dz: torch.Tensor,
    x: torch.Tensor,
    mu: torch.Tensor,
    rsigma: torch.Tensor,
    gamma: torch.Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of input, weight and bias."""
    grad, rows = (tensor.float().reshape(-1, x.shape[-1]) for tensor in (dz, x))
    normed = (rows - mu[:, None]) * rsigma[:, None]
    scaled = grad * _gamma(gamma, zero_centered_gamma)
    centered = scaled - scaled.mean(dim=-1, keepdim=True) - normed * (scaled * normed).mean(dim=-1, keepdim=True)
    dx = (centered * rsigma[:, None]).to(x.dtype).view(x.shape)
    return dx, (grad * normed).sum(dim=0).to(gamma.dtype), grad.sum(dim=0).to(gamma.dtype)


@dense("input", "weight", "ln_out")
def rmsnorm_fwd(
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    ln_out: Any,
    quantizer: Any,
    otype: int,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[Any, None, torch.Tensor]:
    """RMSNorm of rows with its output, no means, and reciprocal root mean squares."""
    rows = input.float()
    rsigma = torch.rsqrt(rows.square().mean(dim=-1) + eps)
    value = rows * rsigma[..., None] * _gamma(weight, zero_centered_gamma)
    return _output(value, ln_out, quantizer, otype), None, rsigma.flatten()


def rmsnorm_bwd(
    dz: torch.Tensor,
    x: torch.Tensor,
    rsigma: torch.Tensor,
    gamma: torch.Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of input and weight."""
    grad, rows = (tensor.float().reshape(-1, x.shape[-1]) for tensor in (dz, x))
    normed = rows * rsigma[:, None]
    scaled = grad * _gamma(gamma, zero_centered_gamma)
    dx = (scaled - normed * (scaled * normed).mean(dim=-1, keepdim=True)) * rsigma[:, None]
    return dx.to(x.dtype).view(x.shape), (grad * normed).sum(dim=0).to(gamma.dtype)
