"""Apex's extension ``fused_weight_gradient_mlp_cuda`` in plain torch, by which Megatron's own linear layers fuse dW."""

import torch

from tests.te_cpu.dense import dense


@dense("input", "grad_output", "main_grad")
@torch.no_grad()
def wgrad_gemm_accum_fp32(input: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor) -> None:
    """Adds ``grad_output.T @ input`` to an fp32 gradient inside the GEMM, without rounding dW to 16 bits."""
    assert main_grad.dtype is torch.float32
    main_grad.addmm_(grad_output.float().t(), input.float())


@dense("input", "grad_output", "main_grad")
@torch.no_grad()
def wgrad_gemm_accum_fp16(input: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor) -> None:
    """The same for a gradient of 16 bits."""
    assert main_grad.dtype in (torch.float16, torch.bfloat16)
    main_grad.addmm_(grad_output.t(), input)
