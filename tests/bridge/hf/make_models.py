"""Writes small random Hugging Face models: ``make_models.py FOLDER FAMILY...``; without Megatron."""

import json
import sys
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file

VOCAB = 256
PREDICTS = "-mtp"
"""End of a family's name: with a layer that predicts one token more."""
COMMON: dict[str, Any] = {
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0),
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "router_aux_loss_coef": 0.0,
    "num_experts_per_tok": 2,
}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
SIZES = {"intermediate_size": 128, "moe_intermediate_size": 32}
ROUTED = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "num_nextn_predict_layers": 0,
}
LATENT = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
YARN = {  # as in the released model, for another context
    **{"rope_type": "yarn", "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    **{"mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1},
}
ALL_SPARSE = {"decoder_sparse_step": 1, "norm_topk_prob": True, "num_experts": 8}
FAMILIES: dict[str, tuple[type, dict[str, Any]]] = {
    "qwen3_moe": (transformers.Qwen3MoeConfig, {**HEADS, **SIZES, **ALL_SPARSE, "rope_theta": 1e6}),
    "deepseek_v3": (transformers.DeepseekV3Config, {**SIZES, **ROUTED, **LATENT, "rope_scaling": YARN}),
    "glm4_moe": (transformers.Glm4MoeConfig, {**HEADS, **SIZES, **ROUTED, "use_qk_norm": True}),
    "mixtral": (transformers.MixtralConfig, {**HEADS, "intermediate_size": 32, "num_local_experts": 8}),
}


def fill(model: torch.nn.Module) -> None:
    """Weights as different from each other as in a trained model: fresh norms are all 1, fresh biases 0."""
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in name:
                value.uniform_(0.5, 1.5)
            elif "e_score" in name:
                value.uniform_(-0.1, 0.1)
            elif "inv_freq" not in name:
                value.normal_(0, 0.1)


def add_prediction(folder: Path) -> None:
    """Adds a layer that predicts one token more, as released models have it; transformers does not read it."""
    weights = load_file(folder / "model.safetensors")
    first, more = f"model.layers.{COMMON['num_hidden_layers']}.", torch.Generator().manual_seed(2)
    last = f"model.layers.{COMMON['num_hidden_layers'] - 1}."
    new = {first + name.removeprefix(last): value.clone() for name, value in weights.items() if name.startswith(last)}
    size = COMMON["hidden_size"]
    new |= {first + name: torch.rand(size, generator=more) for name in ("enorm.weight", "hnorm.weight")}
    new[first + "shared_head.norm.weight"] = torch.rand(size, generator=more)
    new[first + "eh_proj.weight"] = torch.rand(size, 2 * size, generator=more) / size
    new[first + "embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    new[first + "shared_head.head.weight"] = weights["lm_head.weight"].clone()
    save_file(weights | new, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))


def write(folder: Path, family: str) -> None:
    """Writes weights, configuration and a tokenizer whose words are w0, w1, ..."""
    torch.manual_seed(1)
    config_class, own = FAMILIES[family.removesuffix(PREDICTS)]
    model = transformers.AutoModelForCausalLM.from_config(config_class(**COMMON, **own), dtype=torch.float32)
    fill(model)
    model.save_pretrained(folder)
    if family.endswith(PREDICTS):
        add_prediction(folder)
    words = tokenizers.models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w0").save_pretrained(folder)


if __name__ == "__main__":
    for family in sys.argv[2:]:
        write(Path(sys.argv[1]) / family, family)
