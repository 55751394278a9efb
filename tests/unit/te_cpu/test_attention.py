"""Fused attention of the tests' Transformer Engine against autograd of the torch expression."""

import pytest
import torch

from tests.te_cpu import extension as tex
from tests.te_cpu.enums import (
    NVTE_Bias_Type,
    NVTE_Mask_Type,
    NVTE_QKV_Format,
    NVTE_QKV_Layout,
    NVTE_Softmax_Type,
)

BATCH, QUERIES, KEYS, HEADS, GROUPS, CHANNELS = 2, 4, 6, 4, 2, 8
SCALE = 0.3


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def inputs(form: str) -> list[torch.Tensor]:
    """Queries, keys of fewer heads, and values of more channels."""
    sizes = (QUERIES, HEADS, CHANNELS), (KEYS, GROUPS, CHANNELS), (KEYS, GROUPS, CHANNELS + 2)
    return [randn(*([s, BATCH] if form == "SBHD" else [BATCH, s]), heads, channels) for s, heads, channels in sizes]


def settings(mask: str, window: tuple[int, int], bottom_right: bool) -> tuple:
    bias, softmax = NVTE_Bias_Type.NVTE_NO_BIAS, NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX
    return bias, NVTE_Mask_Type[f"NVTE_{mask}"], softmax, window, bottom_right


def forward(form: str, tensors: list[torch.Tensor], *chosen, dropout: float = 0.0, max_logit: bool = False):
    layout, out = NVTE_QKV_Layout[f"NVTE_{form}_{form}_{form}"], NVTE_QKV_Format[f"NVTE_{form}"]
    sizes = [QUERIES, KEYS, True, SCALE, dropout, True]
    arguments = [
        *sizes,
        layout,
        out,
        out,
        *chosen,
        None,
        None,
        *tensors,
        torch.float32,
        *[None] * 9,
        0,
        max_logit,
        False,
    ]
    return tex.fused_attn_fwd(*arguments)


def expected(form: str, tensors: list[torch.Tensor], mask: str, window: tuple[int, int], bottom_right: bool):
    order = (1, 2, 0, 3) if form == "SBHD" else (0, 2, 1, 3)
    query, key, value = (tensor.permute(order) for tensor in tensors)
    key, value = (tensor.repeat_interleave(HEADS // GROUPS, dim=1) for tensor in (key, value))
    diagonal = KEYS - QUERIES if bottom_right else 0
    seen = torch.ones(QUERIES, KEYS, dtype=torch.bool)
    if "CAUSAL" in mask:
        seen = seen.tril(diagonal)
    if window[0] >= 0:
        seen = seen.triu(diagonal - window[0])
    scores = (SCALE * query @ key.transpose(-1, -2)).masked_fill(~seen, float("-inf"))
    output = (scores.softmax(dim=-1) @ value).permute((2, 0, 1, 3) if form == "SBHD" else order)
    return output, scores.logsumexp(dim=-1, keepdim=True)


@pytest.mark.parametrize("form", ["SBHD", "BSHD"])
@pytest.mark.parametrize(
    ("mask", "window", "bottom_right"),
    [
        ("NO_MASK", (-1, -1), False),
        ("CAUSAL_MASK", (-1, 0), False),
        ("CAUSAL_BOTTOM_RIGHT_MASK", (-1, 0), True),
        ("CAUSAL_BOTTOM_RIGHT_MASK", (1, 0), True),
    ],
)
def test_te_fused_attention_equals_autograd(form, mask, window, bottom_right):
    tensors = [tensor.requires_grad_() for tensor in inputs(form)]
    wanted, wanted_lse = expected(form, tensors, mask, window, bottom_right)
    grad = randn(*wanted.shape) * 2
    wanted.backward(grad)
    plain = [tensor.detach() for tensor in tensors]
    chosen = settings(mask, window, bottom_right)
    out, lse, rng_state = forward(form, plain, *chosen)
    torch.testing.assert_close(out, wanted.detach())
    torch.testing.assert_close(lse, wanted_lse.detach())
    layout, out_format = NVTE_QKV_Layout[f"NVTE_{form}_{form}_{form}"], NVTE_QKV_Format[f"NVTE_{form}"]
    sizes = [QUERIES, KEYS, SCALE, 0.0, True]
    formats = [layout, out_format, out_format, layout, out_format, out_format]
    saved = [*plain, out, grad, torch.float32, [lse, rng_state]]
    arguments = [*sizes, *formats, *chosen, True, None, None, *saved, *[None] * 5, False]
    *grads, bias_grad, offset_grad = tex.fused_attn_bwd(*arguments)
    for actual, tensor in zip(grads, tensors, strict=True):
        torch.testing.assert_close(actual, tensor.grad, atol=1e-5, rtol=1e-5)
    assert (bias_grad, offset_grad) == (None, None)


@pytest.mark.parametrize(
    ("mask", "options", "words"),
    [
        ("PADDING_MASK", {}, "this mask"),
        ("NO_MASK", {"dropout": 0.1}, "dropout"),
        ("NO_MASK", {"max_logit": True}, "the largest logit"),
    ],
)
def test_te_fused_attention_refuses_what_it_cannot_do(mask, options, words):
    with pytest.raises(NotImplementedError, match=words):
        forward("SBHD", inputs("SBHD"), *settings(mask, (-1, -1), False), **options)
