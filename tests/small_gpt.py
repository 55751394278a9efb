"""Small models of Megatron's local layers, or of Transformer Engine's."""

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


def small_hybrid(config: Any, pattern: str, te: bool = False, **arguments: Any) -> Any:
    """
    Args:
        pattern: symbol of each layer, as in ``--hybrid-layer-pattern``.
        te: layers of Transformer Engine, as in every real run; see :func:`local_hybrid_stack` for the others.
        arguments: of Megatron's ``HybridModel``.
    """
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    spec = hybrid_stack_spec if te else local_hybrid_stack(config)
    return HybridModel(config, spec, VOCAB, SEQ_LENGTH, hybrid_layer_pattern=pattern, **arguments)


def local_hybrid_stack(config: Any) -> Any:
    """Local layers for a hybrid model; without a final norm, because Megatron's hybrid stack only knows TE's."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import (
        MoETransformerLayer,
        TransformerLayer,
        TransformerLayerSubmodules,
    )

    dense = get_gpt_layer_local_submodules(normalization=config.normalization)
    moe = get_gpt_layer_local_submodules(num_experts=config.num_moe_experts, normalization=config.normalization)

    def layer(module: type, **submodules: Any) -> Any:
        return ModuleSpec(module=module, submodules=TransformerLayerSubmodules(**submodules))

    layers = HybridStackSubmodules(
        attention_layer=layer(
            TransformerLayer,
            input_layernorm=dense.input_layernorm,
            self_attention=dense.self_attention,
            self_attn_bda=get_bias_dropout_add,
        ),
        mlp_layer=layer(
            MLPLayer, pre_mlp_layernorm=dense.pre_mlp_layernorm, mlp=dense.mlp, mlp_bda=get_bias_dropout_add
        ),
        moe_layer=layer(
            MoETransformerLayer, pre_mlp_layernorm=moe.pre_mlp_layernorm, mlp=moe.mlp, mlp_bda=get_bias_dropout_add
        ),
    )
    return ModuleSpec(module=HybridStack, submodules=layers, params={"post_layer_norm": False})
