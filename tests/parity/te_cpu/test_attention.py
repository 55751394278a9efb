"""Transformer Engine's context parallel attention runs on gloo and is the attention to the whole sequence.

Two ranks divide the sequence: each has the first and the last quarter, or the others.
"""

import itertools
import warnings

import pytest
import torch
import torch.distributed as dist

from tests.ranks import launch

pytestmark = pytest.mark.distributed

SEQUENCE, BATCH, HEADS, CHANNELS = 16, 2, 4, 8
TOLERANCE = {"torch.float32": 1e-6, "torch.bfloat16": 2.0**-7}
"""Of the largest value. Two roundings to bf16: of the part of each rank's keys, and of their sum."""


def own_part(whole: torch.Tensor) -> torch.Tensor:
    """This rank's two of four parts of the sequence: causal work is then even."""
    parts, rank = whole.chunk(4), dist.get_rank()
    return torch.cat([parts[rank], parts[3 - rank]])


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal attention to [sequence, batch, heads, channels] in fp32."""
    query, key, value = (tensor.float().permute(1, 2, 0, 3) for tensor in (query, key, value))
    output = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    return output.permute(2, 0, 1, 3).flatten(2)


def difference(communication: str, dtype: torch.dtype) -> list[float]:
    """Of the output and of the gradients of queries, keys and values."""
    import transformer_engine.pytorch as te

    generator = torch.Generator().manual_seed(0)
    shape = (SEQUENCE, BATCH, HEADS, CHANNELS)
    whole = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for _ in range(3)]
    grad = torch.randn(SEQUENCE, BATCH, HEADS * CHANNELS, generator=generator).to(dtype)
    expected = attention(*whole)
    expected.backward(grad)
    parts = [own_part(tensor.detach()).requires_grad_() for tensor in whole]
    layer = te.DotProductAttention(HEADS, CHANNELS, qkv_format="sbhd", attn_mask_type="causal", attention_dropout=0.0)
    layer.set_context_parallel_group(dist.group.WORLD, [0, 1], torch.cuda.Stream(), communication)
    output = layer(*parts)
    output.backward(own_part(grad))
    pairs = [(output, expected), *((part.grad, tensor.grad) for part, tensor in zip(parts, whole, strict=True))]
    return [
        ((mine.float() - own_part(theirs).float()).abs().max() / theirs.abs().max()).item() for mine, theirs in pairs
    ]


def differences() -> dict[str, list[float]]:
    """For each way of communication and each type, of the output and of the gradients from attention in fp32."""
    warnings.simplefilter("ignore")
    ways = itertools.product(("p2p", "a2a", "all_gather"), (torch.float32, torch.bfloat16))
    return {f"{communication} {dtype}": difference(communication, dtype) for communication, dtype in ways}


def test_te_context_parallel_attention_equals_whole_attention(tmp_path):
    for result in launch.results_of(differences, 2, tmp_path, 100, te=launch.Te()):
        assert len(result) == 6
        for name, found in result.items():
            assert max(found) < TOLERANCE[name.split()[1]], name
