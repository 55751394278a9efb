"""Cost of attention to one more position, from the sizes of a model."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

_ATTENTION, _EXPERTS, _MLP = "*", "E", "-"
"""Layers of one part, by their symbol in ``--hybrid-layer-pattern``."""


def tokens_per_pair(settings: Any, vocab_size: int, hybrid_layer_pattern: str | None = None) -> float:
    """Cost of a position's attention to one other, in units of all other work on one token.

    Both are counted in multiply-adds of matrix products in the forward pass; the backward pass has twice as many of
    each. It is :attr:`~megatron_lancet.planning.documents.cost.DocumentCost.tokens_per_pair`.

    Args:
        settings: Megatron's arguments, or the configuration that was made of them.
        vocab_size: columns of the output layer, over all ranks.
        hybrid_layer_pattern: of a hybrid model; None for a GPT.
    """
    per_token, per_pair = vocab_size * settings.hidden_size, 0
    for part, number in _num_parts(settings, hybrid_layer_pattern).items():
        if part == _ATTENTION:
            per_token += number * _attention_weights(settings)
            per_pair += number * _attention_per_pair(settings)
        else:
            per_token += number * (_expert_weights(settings) if part == _EXPERTS else _mlp_weights(settings))
    predictions = settings.mtp_num_layers or 0  # each has a projection, a layer like the last one, and the output layer
    per_token += predictions * (2 * settings.hidden_size**2 + vocab_size * settings.hidden_size)
    return per_pair / per_token


def _num_parts(settings: Any, pattern: str | None) -> Counter[str]:
    """Number of layers, or of halves of layers, with each part."""
    if pattern is not None:
        return Counter(symbol for symbol in pattern if symbol in (_ATTENTION, _EXPERTS, _MLP))
    has_experts = _layers_with_experts(settings)
    has_experts += has_experts[-1:] * (settings.mtp_num_layers or 0)
    num = len(has_experts)
    return +Counter({_ATTENTION: num, _EXPERTS: sum(has_experts), _MLP: num - sum(has_experts)})


def _layers_with_experts(settings: Any) -> list[bool]:
    if settings.num_moe_experts is None:
        return [False] * settings.num_layers
    frequency: int | Sequence[int] = settings.moe_layer_freq
    if isinstance(frequency, int):
        return [layer % frequency == 0 for layer in range(settings.num_layers)]
    return [bool(has_experts) for has_experts in frequency]


def _heads(settings: Any) -> tuple[int, int]:
    """Number of heads, and channels of a head of queries and keys."""
    if settings.multi_latent_attention:
        return settings.num_attention_heads, settings.qk_head_dim + settings.qk_pos_emb_head_dim
    return settings.num_attention_heads, settings.kv_channels or settings.hidden_size // settings.num_attention_heads


def _attention_per_pair(settings: Any) -> int:
    heads, channels = _heads(settings)
    return heads * (channels + (settings.v_head_dim if settings.multi_latent_attention else channels))


def _attention_weights(settings: Any) -> int:
    """Weights of the projections."""
    hidden, (heads, channels) = settings.hidden_size, _heads(settings)
    if not settings.multi_latent_attention:
        return hidden * channels * (2 * heads + 2 * (settings.num_query_groups or heads))
    query = hidden * heads * channels
    if settings.q_lora_rank is not None:
        query = settings.q_lora_rank * (hidden + heads * channels)
    down = hidden * (settings.kv_lora_rank + settings.qk_pos_emb_head_dim)
    up = settings.kv_lora_rank * heads * (settings.qk_head_dim + settings.v_head_dim)
    return query + down + up + heads * settings.v_head_dim * hidden


def _mlp_weights(settings: Any, ffn_size: int | None = None) -> int:
    is_gated = getattr(settings, "gated_linear_unit", False) or getattr(settings, "swiglu", False)
    size = ffn_size or settings.ffn_hidden_size or 4 * settings.hidden_size
    return (3 if is_gated else 2) * settings.hidden_size * size


def _expert_weights(settings: Any) -> int:
    """Weights that a token is multiplied with: of its experts, of the shared experts and of the router."""
    chosen = settings.moe_router_topk * _mlp_weights(settings, settings.moe_ffn_hidden_size)
    shared_size = settings.moe_shared_expert_intermediate_size
    shared = _mlp_weights(settings, shared_size) if shared_size else 0
    return chosen + shared + settings.hidden_size * settings.num_moe_experts
