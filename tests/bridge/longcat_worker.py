"""A small random LongCat-Flash in ``transformers`` and in wired Megatron layers: ``longcat_worker.py ANSWERS.json``.

Megatron has two layers for each of LongCat's: the first one's shared expert is its first dense MLP. LongCat scales
queries and latent keys by constants, which go into the weights behind them here.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import LongcatFlashConfig, LongcatFlashForCausalLM

VOCAB, SEQ_LENGTH, BATCH = 96, 24, 2
HIDDEN, Q_RANK, KV_RANK = 64, 32, 16
HEADS, NOPE, ROPE, VALUE = 4, 16, 8, 16
EXPERTS, TOPK, SCALE, THETA, EPSILON = 8, 3, 2.5, 1e4, 1e-6


def reference(num_identity: int) -> Any:
    torch.manual_seed(1)
    sizes: dict[str, Any] = {
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0),
        **{"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_layers": 2, "num_hidden_layers": 4},
        **{"num_attention_heads": HEADS, "ffn_hidden_size": 96, "expert_ffn_hidden_size": 32},
        **{"q_lora_rank": Q_RANK, "kv_lora_rank": KV_RANK, "v_head_dim": VALUE},
        **{"qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE, "head_dim": ROPE},
        **{
            "moe_topk": TOPK,
            "n_routed_experts": EXPERTS,
            "routed_scaling_factor": SCALE,
            "zero_expert_num": num_identity,
        },
        "rms_norm_eps": EPSILON,  # of all norms; latent queries' and keys' norms have 1e-6 in any case
        "max_position_embeddings": SEQ_LENGTH,
        "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
        "attn_implementation": "eager",
    }
    model = LongcatFlashForCausalLM(LongcatFlashConfig(**sizes)).float().eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.uniform_(0.5, 1.5) if "norm" in name else value.normal_(0, 0.1)
    return model


def wired_model(num_identity: int) -> Any:
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from megatron_lancet.features.shortcut.model import wire
    from megatron_lancet.training.megatron.patches import fused_core_attention
    from tests.small_gpt import small_gpt, transformer_config

    model_parallel_cuda_manual_seed(1)
    config = transformer_config(
        **{"num_layers": 4, "moe_layer_freq": [1, 0] * 2, "hidden_size": HIDDEN, "ffn_hidden_size": 96},
        **{"num_attention_heads": HEADS, "gated_linear_unit": True, "activation_func": torch.nn.functional.silu},
        **{"normalization": "RMSNorm", "layernorm_epsilon": EPSILON, "multi_latent_attention": True},
        **{"qk_layernorm": True, "q_lora_rank": Q_RANK, "kv_lora_rank": KV_RANK, "v_head_dim": VALUE},
        **{"qk_head_dim": NOPE, "qk_pos_emb_head_dim": ROPE, "rope_type": "rope", "rotary_base": THETA},
        **{"mscale_all_dim": 0.0, "apply_rope_fusion": False},
        **{"num_moe_experts": EXPERTS, "moe_router_topk": TOPK, "moe_router_pre_softmax": True},
        **{"moe_router_topk_scaling_factor": SCALE, "moe_router_dtype": "fp32", "moe_ffn_hidden_size": 32},
        **{"moe_shared_expert_intermediate_size": 96, "moe_router_load_balancing_type": "none"},
        moe_token_dispatcher_type="alltoall",
    )
    with fused_core_attention(True):
        model = small_gpt(config, vocab_size=VOCAB, max_sequence_length=SEQ_LENGTH, position_embedding_type="rope")
    wire([model], num_identity)
    return model.eval()


def weights(theirs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """LongCat's weights by Megatron's names."""
    found = {
        "embedding.word_embeddings.weight": theirs["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": theirs["model.norm.weight"],
        "output_layer.weight": theirs["lm_head.weight"],
    }
    for number in range(4):
        layer, half = f"model.layers.{number // 2}", number % 2
        ours, attention = f"decoder.layers.{number}", f"{layer}.self_attn.{half}"
        found |= {
            f"{ours}.input_layernorm.weight": theirs[f"{layer}.input_layernorm.{half}.weight"],
            f"{ours}.pre_mlp_layernorm.weight": theirs[f"{layer}.post_attention_layernorm.{half}.weight"],
            f"{ours}.self_attention.linear_q_down_proj.weight": theirs[f"{attention}.q_a_proj.weight"],
            f"{ours}.self_attention.q_layernorm.weight": theirs[f"{attention}.q_a_layernorm.weight"],
            f"{ours}.self_attention.linear_q_up_proj.weight": theirs[f"{attention}.q_b_proj.weight"]
            * (HIDDEN / Q_RANK) ** 0.5,
            f"{ours}.self_attention.linear_kv_down_proj.weight": theirs[f"{attention}.kv_a_proj_with_mqa.weight"],
            f"{ours}.self_attention.kv_layernorm.weight": theirs[f"{attention}.kv_a_layernorm.weight"]
            * (HIDDEN / KV_RANK) ** 0.5,
            f"{ours}.self_attention.linear_kv_up_proj.weight": theirs[f"{attention}.kv_b_proj.weight"],
            f"{ours}.self_attention.linear_proj.weight": theirs[f"{attention}.o_proj.weight"],
        }
        gate, up, down = (theirs[f"{layer}.mlps.{half}.{name}_proj.weight"] for name in ("gate", "up", "down"))
        dense = f"{ours}.mlp" if half else f"{ours}.mlp.shared_experts"
        found |= {f"{dense}.linear_fc1.weight": torch.cat((gate, up)), f"{dense}.linear_fc2.weight": down}
        if half:
            continue
        found[f"{ours}.mlp.router.weight"] = theirs[f"{layer}.mlp.router.classifier.weight"]
        for expert in range(EXPERTS):
            local = f"{ours}.mlp.experts.local_experts.{expert}"
            found[f"{local}.linear_fc1.weight"] = theirs[f"{layer}.mlp.experts.gate_up_proj"][expert]
            found[f"{local}.linear_fc2.weight"] = theirs[f"{layer}.mlp.experts.down_proj"][expert]
    return found


def compared(num_identity: int) -> dict[str, float]:
    """Largest differences of logits, over the largest logit; also where the weights of experts lack their factor."""
    tokens = torch.randint(VOCAB, (BATCH, SEQ_LENGTH), generator=torch.Generator().manual_seed(2))
    inputs: dict[str, Any] = {"input_ids": tokens, "position_ids": torch.arange(SEQ_LENGTH).expand(BATCH, -1)}
    theirs, ours = reference(num_identity), wired_model(num_identity)
    own = weights(theirs.state_dict())
    names = {name for name, _ in ours.named_parameters()}
    assert own.keys() == names, own.keys() ^ names
    ours.load_state_dict(own, strict=False)
    expected = theirs(tokens).logits

    def difference() -> float:
        logits = ours(**inputs, attention_mask=None)
        return ((logits - expected).abs().max() / expected.abs().max()).item()

    found = {"logits": difference()}
    for layer in ours.decoder.layers[::2]:
        layer.mlp.router.config.moe_router_topk_scaling_factor = 1.0
    return {**found, "without_the_factor": difference()}


def main() -> None:
    from megatron.core import parallel_state

    from megatron_lancet.training.platform.cpu import cpu_platform

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with cpu_platform(), torch.no_grad():
        parallel_state.initialize_model_parallel()
        found = {number: compared(number) for number in (0, 4)}
    Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
