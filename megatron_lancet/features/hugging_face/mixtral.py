"""Mixtral for Megatron-Bridge, whose version 0.6.2 does not have it."""

from functools import cache
from typing import Any

_NAMES = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "output_layer.weight": "lm_head.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "decoder.layers.*.self_attention.linear_qkv.layer_norm_weight": "model.layers.*.input_layernorm.weight",
    "decoder.layers.*.self_attention.linear_proj.weight": "model.layers.*.self_attn.o_proj.weight",
    "decoder.layers.*.pre_mlp_layernorm.weight": "model.layers.*.post_attention_layernorm.weight",
    "decoder.layers.*.mlp.router.weight": "model.layers.*.block_sparse_moe.gate.weight",
    "decoder.layers.*.mlp.experts.linear_fc2.weight*": "model.layers.*.block_sparse_moe.experts.*.w2.weight",
}
_EXPERT = "model.layers.*.block_sparse_moe.experts.*"
_ATTENTION = "model.layers.*.self_attn"


@cache
def register() -> None:
    """Lets Bridge convert Mixtral, unless it can already."""
    from megatron.bridge.models.conversion.auto_bridge import AutoBridge
    from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
    from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
    from megatron.bridge.models.conversion.param_mapping import AutoMapping, GatedMLPMapping, QKVMapping
    from megatron.core.models.gpt.gpt_model import GPTModel
    from transformers import MixtralForCausalLM

    if MixtralForCausalLM.__name__ in AutoBridge.list_supported_models():
        return

    class MixtralBridge(MegatronModelBridge):
        """Its experts have the size of a dense layer, and the probabilities of a token's experts sum to 1."""

        def provider_bridge(self, hf_pretrained: Any) -> Any:
            provider = super().provider_bridge(hf_pretrained)
            provider.normalization, provider.gated_linear_unit = "RMSNorm", True
            provider.add_bias_linear = provider.add_qkv_bias = False
            provider.hidden_dropout = 0.0
            provider.moe_ffn_hidden_size = provider.ffn_hidden_size
            provider.moe_router_pre_softmax = False
            provider.moe_router_load_balancing_type = "aux_loss"
            provider.moe_token_dispatcher_type = "alltoall"  # noqa: S105 - no password
            return provider

        def mapping_registry(self) -> Any:
            return MegatronMappingRegistry(
                *(AutoMapping(megatron, hugging_face) for megatron, hugging_face in _NAMES.items()),
                QKVMapping(
                    "decoder.layers.*.self_attention.linear_qkv.weight",
                    **{part: f"{_ATTENTION}.{part}_proj.weight" for part in "qkv"},
                ),
                GatedMLPMapping(
                    "decoder.layers.*.mlp.experts.linear_fc1.weight*",
                    gate=f"{_EXPERT}.w1.weight",
                    up=f"{_EXPERT}.w3.weight",
                ),
            )

    MegatronModelBridge.register_bridge(source=MixtralForCausalLM, target=GPTModel, model_type="mixtral")(MixtralBridge)
