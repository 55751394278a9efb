"""Fused attention, which Transformer Engine's context parallelism needs; in fp32, too, which no GPU has.

Source: ``csrc/extensions/attention.cpp``. Without context parallelism there is none, and Transformer Engine takes its
unfused attention.
"""

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from megatron_lancet.patching import around, replaced
from tests.te_cpu.dense import check_dense, dense
from tests.te_cpu.enums import (
    NVTE_Bias_Type,
    NVTE_Fused_Attn_Backend,
    NVTE_Mask_Type,
    NVTE_QKV_Format,
    NVTE_QKV_Layout,
    NVTE_Softmax_Type,
)

_MASKS = ("NVTE_NO_MASK", "NVTE_CAUSAL_MASK", "NVTE_CAUSAL_BOTTOM_RIGHT_MASK")


class _WaitsOnce:
    """A send or a receive whose end can be waited for again, as NCCL's; gloo's would never return."""

    def __init__(self, work: torch.distributed.Work) -> None:
        self._work: torch.distributed.Work | None = work

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None


@contextmanager
def context_parallel_attention() -> Iterator[None]:
    """Inside the context attention with context parallelism runs on gloo, by the fused attention of this file.

    It finds this attention whatever the environment forbids: Megatron's CPU settings ask for the unfused one. Fp32
    passes for bf16 where the type is looked at, so that sums of chunks can be compared without roundings to bf16.
    """
    from transformer_engine.pytorch.attention.dot_product_attention import backends, context_parallel, utils

    def choose(stock: Callable[..., Any], params: Any) -> Any:
        return _with_fused_attention(stock, params) if params.context_parallel else stock(params)

    def forward(stock: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        quantized = backends.QuantizedTensorStorage  # these may have any type
        with replaced(backends, "QuantizedTensorStorage", (quantized, torch.Tensor)):
            return stock(*args, **kwargs)

    def communicate(stock: Callable[..., list[torch.distributed.Work]], *args: Any) -> list[_WaitsOnce]:
        return [_WaitsOnce(work) for work in stock(*args)]

    with (
        around(utils, "get_attention_backend", choose),
        around(backends.FusedAttention, "forward", forward),
        around(context_parallel, "flash_attn_p2p_communicate", communicate),
    ):
        yield


@contextmanager
def fused_attention() -> Iterator[None]:
    """Makes all attention use this file's fused kernel, as on a GPU with cuDNN."""
    from transformer_engine.pytorch.attention import dot_product_attention
    from transformer_engine.pytorch.attention.dot_product_attention import utils

    chosen = dot_product_attention._attention_backends  # its choice for the last parameters
    before = dict(chosen)
    chosen["attention_params"] = None
    with around(utils, "get_attention_backend", _with_fused_attention):
        yield
    chosen.update(before)


def _with_fused_attention(stock: Callable[..., Any], params: Any) -> Any:
    """Returns Transformer Engine's choice if this file's attention is available; treats fp32 as bf16."""
    from tests.te_cpu import extension

    found = NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen, ""
    if params.qkv_dtype == torch.float32:
        params = dataclasses.replace(params, qkv_dtype=torch.bfloat16)
    with (
        mock.patch.dict(os.environ, NVTE_FUSED_ATTN="1"),
        replaced(extension, "get_fused_attn_backend", lambda _: found),
    ):
        return stock(params)


def get_fused_attn_backend(fused_attn_params: Any) -> tuple[int, str]:
    """There is no fused attention where the unfused one will do."""
    return NVTE_Fused_Attn_Backend.NVTE_No_Backend, "there is no cuDNN"


@dense("cu_seqlens_q", "cu_seqlens_kv", "Bias", "SoftmaxOffset")
def fused_attn_fwd(
    max_seqlen_q: int,
    max_seqlen_kv: int,
    is_training: bool,
    attn_scale: float,
    p_dropout: float,
    set_zero: bool,
    qkv_layout: int,
    o_format: int,
    qkv_scale_inv_format: int,
    bias_type: int,
    attn_mask_type: int,
    softmax_type: int,
    window_size: Sequence[int],
    bottom_right_diagonal: bool,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_kv: torch.Tensor,
    Q: torch.Tensor,
    K: torch.Tensor,
    V: torch.Tensor,
    fake_dtype: torch.dtype,
    cu_seqlens_q_padded: torch.Tensor | None,
    cu_seqlens_kv_padded: torch.Tensor | None,
    page_table_k: torch.Tensor | None,
    page_table_v: torch.Tensor | None,
    s_quantizer: Any,
    o_quantizer: Any,
    Bias: torch.Tensor | None,
    SoftmaxOffset: torch.Tensor | None,
    rng_gen: torch.Generator | None,
    rng_elts_per_thread: int,
    return_max_logit: bool,
    cuda_graph: bool,
) -> list[torch.Tensor]:
    """Output, logarithms of the softmax's sums [batch, heads, queries, 1] in fp32, and a random state nobody needs."""
    _refuse(
        fp8=s_quantizer is not None or o_quantizer is not None,
        paging=page_table_k is not None,
        the_largest_logit=return_max_logit,
        **_unsupported(p_dropout, bias_type, attn_mask_type, softmax_type),
    )
    formats = _formats(qkv_layout)
    _check_parts(qkv_layout, Q, K, V)
    query, key, value = (_heads_first(*pair) for pair in zip((Q, K, V), formats, strict=True))
    scores = _scores(query, key, attn_scale, attn_mask_type, window_size, bottom_right_diagonal)
    lse = scores.logsumexp(dim=-1, keepdim=True)
    output = torch.exp(scores - lse).nan_to_num() @ _for_heads(value, query)
    output_format = NVTE_QKV_Format(int(o_format)).name.removeprefix("NVTE_")
    return [_in_format(output, output_format, Q.dtype), lse, torch.zeros(2, dtype=torch.int64)]


@dense("cu_seqlens_q", "cu_seqlens_kv", "O", "dO", "Aux_CTX_Tensors")
def fused_attn_bwd(
    max_seqlen_q: int,
    max_seqlen_kv: int,
    attn_scale: float,
    p_dropout: float,
    set_zero: bool,
    qkv_layout: int,
    o_format: int,
    do_format: int,
    dqkv_layout: int,
    qkv_scale_inv_format: int,
    do_scale_inv_format: int,
    bias_type: int,
    attn_mask_type: int,
    softmax_type: int,
    window_size: Sequence[int],
    bottom_right_diagonal: bool,
    deterministic: bool,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_kv: torch.Tensor,
    Q: torch.Tensor,
    K: torch.Tensor,
    V: torch.Tensor,
    O: torch.Tensor,  # noqa: E741 - the extension's name
    dO: torch.Tensor,
    fake_dtype: torch.dtype,
    Aux_CTX_Tensors: Sequence[torch.Tensor],
    cu_seqlens_q_padded: torch.Tensor | None,
    cu_seqlens_kv_padded: torch.Tensor | None,
    s_quantizer: Any,
    dp_quantizer: Any,
    dqkv_quantizer: Any,
    cuda_graph: bool,
) -> list[torch.Tensor | None]:
    """Gradients of queries, keys and values; none of a bias and of a softmax's offset.

    ``O`` and the first of ``Aux_CTX_Tensors`` may be of more keys than these, as context parallelism has them.
    """
    _refuse(fp8=s_quantizer is not None, **_unsupported(p_dropout, bias_type, attn_mask_type, softmax_type))
    formats = _formats(qkv_layout)
    _check_parts(qkv_layout, Q, K, V)
    query, key, value = (_heads_first(*pair) for pair in zip((Q, K, V), formats, strict=True))
    output, grad = (
        _heads_first(tensor, NVTE_QKV_Format(int(form)).name.removeprefix("NVTE_"))
        for tensor, form in ((O, o_format), (dO, do_format))
    )
    scores = _scores(query, key, attn_scale, attn_mask_type, window_size, bottom_right_diagonal)
    lse = Aux_CTX_Tensors[0].reshape(*scores.shape[:-1], 1)
    weights = torch.exp(scores - lse).nan_to_num()
    weights_grad = grad @ _for_heads(value, query).transpose(-1, -2)
    scores_grad = attn_scale * weights * (weights_grad - (grad * output).sum(dim=-1, keepdim=True))
    grads = (
        scores_grad @ _for_heads(key, query),
        _summed(scores_grad.transpose(-1, -2) @ query, key),
        _summed(weights.transpose(-1, -2) @ grad, value),
    )
    return [*(_in_format(g, f, Q.dtype) for g, f in zip(grads, _formats(dqkv_layout), strict=True)), None, None]


def _unsupported(p_dropout: float, bias_type: int, attn_mask_type: int, softmax_type: int) -> dict[str, bool]:
    return {
        "dropout": p_dropout > 0,
        "a_bias": int(bias_type) != NVTE_Bias_Type.NVTE_NO_BIAS,
        "this_mask": NVTE_Mask_Type(int(attn_mask_type)).name not in _MASKS,
        "this_softmax": int(softmax_type) != NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX,
    }


def _refuse(**wanted: bool) -> None:
    for feature, is_wanted in wanted.items():
        if is_wanted:
            raise NotImplementedError(f"fused attention with {feature.replace('_', ' ')} has no stand-in on a CPU")


def _formats(layout: int) -> tuple[str, str, str]:
    """SBHD or BSHD of queries, keys and values; parts of one tensor come as views of their own."""
    words = [word.replace("3", "").replace("2", "") for word in NVTE_QKV_Layout(int(layout)).name.split("_")[1:]]
    return words[0], words[1 if len(words) > 1 else 0], words[-1]


def _check_parts(layout: int, *parts: torch.Tensor) -> None:
    """Kernels derive strides from the layout for parts of one tensor; other parts must have no gaps."""
    if not set("23") & set(NVTE_QKV_Layout(int(layout)).name):
        check_dense("fused attention", "Q, K, V", parts)


def _heads_first(tensor: torch.Tensor, form: str) -> torch.Tensor:
    """[batch, heads, sequence, channels] in fp32."""
    _refuse(**{f"{form}_tensors": form not in ("SBHD", "BSHD")})
    return tensor.float().permute((1, 2, 0, 3) if form == "SBHD" else (0, 2, 1, 3))


def _in_format(tensor: torch.Tensor, form: str, dtype: torch.dtype) -> torch.Tensor:
    _refuse(**{f"{form}_tensors": form not in ("SBHD", "BSHD")})
    return tensor.permute((2, 0, 1, 3) if form == "SBHD" else (0, 2, 1, 3)).to(dtype).contiguous()


def _for_heads(groups: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Keys or values of groups of queries' heads, once per head."""
    return groups.repeat_interleave(query.shape[1] // groups.shape[1], 1)


def _summed(heads: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """The transpose of it."""
    return heads.unflatten(1, (groups.shape[1], -1)).sum(dim=2)


def _scores(
    query: torch.Tensor,
    key: torch.Tensor,
    scale: float,
    mask_type: int,
    window_size: Sequence[int],
    bottom_right_diagonal: bool,
) -> torch.Tensor:
    """Scaled scores, -inf where a query does not see a key.

    A window of (left, right) keys, -1 for all, lies around the diagonal from the first or to the last query and key.
    """
    scores = scale * query @ _for_heads(key, query).transpose(-1, -2)
    num_queries, num_keys = scores.shape[-2:]
    shift = num_keys - num_queries if bottom_right_diagonal else 0
    distance = torch.arange(num_keys) - torch.arange(num_queries)[:, None] - shift
    left, right = window_size
    if "CAUSAL" in NVTE_Mask_Type(int(mask_type)).name:
        right = 0
    seen = torch.ones_like(distance, dtype=torch.bool)
    if right >= 0:
        seen &= distance <= right
    if left >= 0:
        seen &= distance >= -left
    return scores.masked_fill(~seen, float("-inf"))
