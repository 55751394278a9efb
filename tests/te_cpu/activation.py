"""Activation functions: ``csrc/extensions/activation.cpp``, which makes its inputs dense first."""

from typing import Any

import torch
from torch.nn import functional

from tests.te_cpu.fp8.quantize import quantize


def swiglu(input: torch.Tensor, quantizer: Any) -> Any:
    """SiLU of the first half of each row times the second half."""
    gate, linear = input.float().chunk(2, dim=-1)
    value = (functional.silu(gate) * linear).to(input.dtype)
    return value if quantizer is None else quantize(value, quantizer)


def dswiglu(grad: torch.Tensor, fwd_input: torch.Tensor, quantizer: Any) -> Any:
    """The gradient of the input."""
    gate, linear = fwd_input.float().chunk(2, dim=-1)
    sigmoid = torch.sigmoid(gate)
    of_gate = grad.float() * linear * sigmoid * (1 + gate * (1 - sigmoid))
    value = torch.cat([of_gate, grad.float() * gate * sigmoid], dim=-1).to(fwd_input.dtype)
    return value if quantizer is None else quantize(value, quantizer)
