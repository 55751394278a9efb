"""Multiply-adds of a position and of a pair of positions, next to the weights and the kernels of real models."""

import pytest
import torch

from megatron_lancet.planning.sizes.attention import tokens_per_pair
from tests.small_gpt import EXPERTS, VOCAB, small_gpt, transformer_config

MODELS = {
    "dense": {},
    "experts": EXPERTS,
    "some experts, gated, shared, grouped queries": {
        **EXPERTS,
        "moe_layer_freq": [0, 1, 1],
        "gated_linear_unit": True,
        "moe_ffn_hidden_size": 24,
        "moe_shared_expert_intermediate_size": 48,
        "num_query_groups": 2,
        "kv_channels": 6,
    },
    "every second layer": {**EXPERTS, "moe_layer_freq": 2},
    "latent": {
        "multi_latent_attention": True,
        "q_lora_rank": 12,
        "kv_lora_rank": 20,
        "qk_head_dim": 8,
        "qk_pos_emb_head_dim": 4,
        "v_head_dim": 10,
        "rope_type": "rope",
    },
    "predictions": {**EXPERTS, "mtp_num_layers": 2},
}


@pytest.mark.parametrize("name", MODELS)
def test_cost_of_pair_is_that_of_heads_over_weights_of_token(one_rank, name):
    from megatron_lancet.training.megatron.patches import fused_core_attention

    config = transformer_config(**MODELS[name])
    with fused_core_attention(config.multi_latent_attention):
        model = small_gpt(config)
    weights = 0.0
    for parameter, weight in model.named_parameters():
        if weight.dim() == 2 and "embedding" not in parameter:
            num_uses = config.moe_router_topk / config.num_moe_experts if ".local_experts." in parameter else 1.0
            if parameter.startswith("output_layer"):
                num_uses = 1.0 + (config.mtp_num_layers or 0)
            weights += num_uses * weight.numel()
    cores = [module.core_attention for module in model.modules() if hasattr(module, "core_attention")]
    value = config.v_head_dim if config.multi_latent_attention else config.kv_channels
    key = config.qk_head_dim + config.qk_pos_emb_head_dim if config.multi_latent_attention else config.kv_channels
    pairs = len(cores) * config.num_attention_heads * (key + value)
    assert tokens_per_pair(config, VOCAB) == pytest.approx(pairs / weights, rel=1e-12)


def test_a_kernel_computes_as_many_pairs(one_rank):
    from torch.utils.flop_counter import FlopCounterMode

    config, num_positions = transformer_config(), 128
    tensors = [torch.zeros(1, config.num_attention_heads, num_positions, config.kv_channels) for _ in range(3)]
    with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        torch.nn.functional.scaled_dot_product_attention(*tensors)
    model = small_gpt(config)
    with FlopCounterMode(display=False) as linear:
        model.decoder.layers[0].mlp(torch.zeros(num_positions, 1, config.hidden_size))
    mlp_weights = 2 * config.hidden_size * config.ffn_hidden_size
    per_pair = counter.get_total_flops() / num_positions**2  # all pairs, those of later positions included
    per_weight = linear.get_total_flops() / num_positions / mlp_weights
    assert per_pair / per_weight == config.num_attention_heads * 2 * config.kv_channels
