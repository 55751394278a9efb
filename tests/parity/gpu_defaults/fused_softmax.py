"""Megatron's fused softmax of local layers: ``scaled_upper_triang_masked_softmax_cuda`` and its variant, from apex."""

import torch

from tests.te_cpu.dense import dense
from tests.te_cpu.softmax import (
    scaled_upper_triang_masked_softmax_backward,
    scaled_upper_triang_masked_softmax_forward,
)


@dense("input")
def forward(input: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Returns causal attention weights, [batch * heads, queries, keys]; also in fp32, unlike the GPU kernel."""
    return scaled_upper_triang_masked_softmax_forward(input, scale.item())


def backward(output_grads: torch.Tensor, softmax_results: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Returns the gradient of the scores."""
    return scaled_upper_triang_masked_softmax_backward(output_grads, softmax_results, scale.item())


def get_batch_per_block(query_seq_len: int, key_seq_len: int, batches: int, attn_heads: int) -> int:
    """Returns the score rows per thread block, with 128 threads in warps of 32."""
    next_power_of_2 = 1 << (key_seq_len - 1).bit_length()
    warp_size = min(next_power_of_2, 32)
    return 128 // warp_size * (2 if next_power_of_2 <= 128 else 1)
