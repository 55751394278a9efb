"""Small GPT models of Megatron's local layers, or of Transformer Engine's."""

from typing import Any

import torch

VOCAB, SEQ_LENGTH = 64, 16
SETTINGS: dict[str, Any] = {
    "num_layers": 3,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "ffn_hidden_size": 64,
    "add_bias_linear": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "bias_dropout_fusion": False,
    "bias_activation_fusion": False,
}
"""Fields of Megatron's ``TransformerConfig``."""
EXPERTS: dict[str, Any] = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 1e-1,
    "moe_z_loss_coeff": 1e-2,
    "moe_token_dispatcher_type": "alltoall",
}


def transformer_config(**settings: Any) -> Any:
    """Megatron's configuration of a dense model; with :data:`EXPERTS` of one with experts in every layer."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    settings = {**SETTINGS, **settings}
    if settings.get("bf16"):
        settings["params_dtype"] = torch.bfloat16
    is_mla = settings.get("multi_latent_attention", False)
    return (MLATransformerConfig if is_mla else TransformerConfig)(**settings)


def small_gpt(config: Any, pp_rank: int | None = None, te: bool = False, **arguments: Any) -> Any:
    """
    Args:
        pp_rank: the pipeline stage whose layers are built, where it isn't the one of this process.
        te: layers of Transformer Engine.
        arguments: of Megatron's ``GPTModel``.
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=te, normalization=config.normalization, pp_rank=pp_rank
    )
    standard = {
        "vocab_size": VOCAB,
        "max_sequence_length": SEQ_LENGTH,
        "share_embeddings_and_output_weights": False,
    }
    if config.mtp_num_layers and arguments.get("post_process", True):
        standard["mtp_block_spec"] = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=te, pp_rank=pp_rank)
    return GPTModel(config, spec, **{**standard, **arguments})
