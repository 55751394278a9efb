"""Models that are measured.

GPT2-S and GPT2-L come from the Lancet paper: MoE in every other block, two experts per GPU, sequence 512, one expert
per token. Micro-batches are chosen here, and no token is dropped, unlike with the paper's gates.
"""

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Size:
    """A model and its micro-batch, on one of the ranks that share its experts.

    Attributes:
        experts_per_rank: experts in all are as many times the number of ranks.
        moe_every: an MoE block comes after ``moe_every - 1`` dense ones.
        modern: RMSNorm, gated SiLU and rotary positions instead of LayerNorm, GELU and learned positions.
        latent: multi-latent attention with YaRN's rotary positions, as DeepSeek's.
    """

    num_layers: int
    hidden: int
    num_heads: int
    num_key_heads: int
    head_dim: int
    expert_ffn: int
    experts_per_rank: int
    top_k: int
    seq_length: int
    micro_batch: int
    vocab: int
    moe_every: int = 2
    modern: bool = False
    latent: bool = False


def _gpt2(num_layers: int, hidden: int, num_heads: int, micro_batch: int) -> Size:
    head_dim = hidden // num_heads
    return Size(num_layers, hidden, num_heads, num_heads, head_dim, 4 * hidden, 2, 1, 512, micro_batch, vocab=50304)


SIZES = {
    "gpt2-s-moe": _gpt2(12, 768, 12, micro_batch=16),
    "gpt2-l-moe": _gpt2(36, 1280, 20, micro_batch=8),
    # Four of Qwen3-30B-A3B's 48 layers, with its 128 experts; a smaller vocabulary, so that layers dominate.
    "qwen3-like": Size(4, 2048, 32, 4, 128, 768, 16, 8, 4096, 4, 32768, moe_every=1, modern=True),
    "tiny": Size(2, 64, 4, 2, 16, 128, 2, 2, 32, 4, vocab=128, modern=True),
}
ON_CPU = "tiny"
"""The only size that a CPU is asked to run."""


def transformer_config(size: Size, num_ranks: int, bf16: bool, **overrides: Any) -> Any:
    """Megatron's ``TransformerConfig`` of ``size``, without kernels of Transformer Engine or apex."""
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    style: dict[str, Any] = {}
    if size.modern:
        style = {
            "normalization": "RMSNorm",
            "gated_linear_unit": True,
            "activation_func": torch.nn.functional.silu,
        }
    if size.latent:
        style |= {
            "multi_latent_attention": True,
            "rope_type": "yarn",
            "q_lora_rank": size.hidden // 2,
            "kv_lora_rank": size.hidden // 4,
            "qk_head_dim": size.head_dim,
            "qk_pos_emb_head_dim": size.head_dim // 2,
            "v_head_dim": size.head_dim,
        }
    settings: dict[str, Any] = {
        "num_layers": size.num_layers,
        "hidden_size": size.hidden,
        "num_attention_heads": size.num_heads,
        "num_query_groups": size.num_key_heads,
        "kv_channels": size.head_dim,
        "ffn_hidden_size": 4 * size.hidden,
        "moe_ffn_hidden_size": size.expert_ffn,
        "num_moe_experts": size.experts_per_rank * num_ranks,
        "moe_layer_freq": [int((layer + 1) % size.moe_every == 0) for layer in range(size.num_layers)],
        "moe_router_topk": size.top_k,
        "moe_router_pre_softmax": size.top_k == 1,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 1e-2,
        "moe_token_dispatcher_type": "alltoall",
        "expert_model_parallel_size": num_ranks,
        "bf16": bf16,
        "params_dtype": torch.bfloat16 if bf16 else torch.float32,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
    }
    make = MLATransformerConfig if size.latent else TransformerConfig
    return make(**{**settings, **style, **overrides})
