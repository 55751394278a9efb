"""Softmaxes of Transformer Engine's unfused attention, over the last dimension, computed in fp32."""

import torch

from tests.te_cpu.dense import dense

_MASKED = -10000.0
"""Score of a masked key, as in Megatron's kernels: where all keys are masked, each gets the same weight."""


@dense("input")
def scaled_softmax_forward(input: torch.Tensor, scale: float) -> torch.Tensor:
    """Softmax of scaled scores."""
    return torch.softmax(input.float() * scale, dim=-1).to(input.dtype)


def scaled_masked_softmax_forward(input: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """The same; True in the mask takes a key out."""
    return torch.softmax((input.float() * scale).masked_fill(mask.bool(), _MASKED), dim=-1).to(input.dtype)


@dense("input")
def scaled_upper_triang_masked_softmax_forward(input: torch.Tensor, scale: float) -> torch.Tensor:
    """The same for causal attention of [batch * heads, queries, keys], as many queries as keys."""
    return scaled_aligned_causal_masked_softmax_forward(input, scale)


@dense("input")
def scaled_aligned_causal_masked_softmax_forward(input: torch.Tensor, scale: float) -> torch.Tensor:
    """The same for causal attention whose last query sees all keys."""
    num_queries, num_keys = input.shape[-2:]
    later = torch.ones(num_queries, num_keys, dtype=torch.bool).triu(1 + num_keys - num_queries)
    return torch.softmax((input.float() * scale).masked_fill(later, float("-inf")), dim=-1).to(input.dtype)


def scaled_softmax_backward(
    output_grad_: torch.Tensor, softmax_results_: torch.Tensor, scale_factor: float
) -> torch.Tensor:
    """Gradient of the scores, whatever was masked: a key without weight has none."""
    grad, weights = output_grad_.float(), softmax_results_.float()
    inner = (grad * weights).sum(dim=-1, keepdim=True)
    return (scale_factor * weights * (grad - inner)).to(output_grad_.dtype)


scaled_masked_softmax_backward = scaled_aligned_causal_masked_softmax_backward = scaled_softmax_backward


def scaled_upper_triang_masked_softmax_backward(
    output_grads_: torch.Tensor, softmax_results_: torch.Tensor, scale_factor: float
) -> torch.Tensor:
    """The same."""
    return scaled_softmax_backward(output_grads_, softmax_results_, scale_factor)
