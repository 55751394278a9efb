"""The arguments of Megatron's that define a Hugging Face model, from Bridge's configuration of it."""

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.training.arguments import add_megatron_arguments
from torch.nn.functional import silu

from megatron_lancet.data.hugging_face import HUGGING_FACE_TYPE
from megatron_lancet.errors import UsageError
from megatron_lancet.features.hugging_face.flags import FROM
from megatron_lancet.features.hugging_face.source import CONFIG, Source

_SAME = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "normalization", "layernorm_epsilon"),
    *("add_bias_linear", "add_qkv_bias", "qk_layernorm", "qk_l2_norm", "attention_output_gate", "softmax_type"),
    *("window_size", "window_attn_skip_freq", "no_rope_freq", "rotary_interleaved", "layernorm_zero_centered_gamma"),
    *("apply_residual_connection_post_layernorm", "glu_linear_offset", "activation_func_clamp_value"),
    *("multi_latent_attention", "mtp_use_repeated_layer", "experimental_attention_variant", "use_mup"),
    *("moe_layer_freq", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "moe_shared_expert_gate"),
    *("moe_router_topk", "moe_router_num_groups", "moe_router_group_topk", "moe_router_pre_softmax"),
    *("moe_router_topk_scaling_factor", "moe_router_score_function", "moe_router_enable_expert_bias"),
    *("moe_apply_probs_on_input", "moe_latent_size", "moe_router_topk_limited_devices"),
)
"""Fields of the configuration that define the model, and whose arguments have the same names."""
_OF_LATENT_ATTENTION = (
    *("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "rope_type"),
    *("rotary_scaling_factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale"),
    "mscale_all_dim",
)
_OF_TRAINING = (
    *("hidden_dropout", "attention_dropout", "moe_router_load_balancing_type", "moe_aux_loss_coeff"),
    *("moe_router_bias_update_rate", "moe_router_dtype", "moe_token_dispatcher_type", "mtp_loss_scaling_factor"),
)
"""Fields of a training, which a user may choose."""


def model_arguments(source: Source) -> dict[str, Any]:
    """The arguments that define the model, by name.

    Raises:
        UsageError: Megatron's own layers can't compute the model.
    """
    provider = source.provider
    _check_layers(source)
    found = {name: getattr(provider, name) for name in _SAME}
    found |= {
        "kv_channels": provider.kv_channels or provider.hidden_size // provider.num_attention_heads,
        "num_experts": provider.num_moe_experts,
        "mtp_num_layers": provider.mtp_num_layers or None,
        "untie_embeddings_and_output_weights": not provider.share_embeddings_and_output_weights,
        "padded_vocab_size": provider.vocab_size,
        "position_embedding_type": provider.position_embedding_type,
        "rotary_base": int(provider.rotary_base),
        "rotary_percent": provider.rotary_percent,
        "use_rope_scaling": False,
        "swiglu": True,
        "quick_geglu": False,
    }
    if provider.multi_latent_attention:
        return found | {name: getattr(provider, name) for name in _OF_LATENT_ATTENTION}
    return found | {"group_query_attention": True, "num_query_groups": provider.num_query_groups}


def _check_layers(source: Source) -> None:
    """
    Raises:
        UsageError: the model has layers of its own, or something that Bridge leaves out.
    """
    from megatron.bridge.models.gpt_provider import GPTModelProvider, default_layer_spec
    from megatron.bridge.models.mla_provider import MLAModelProvider

    provider, config = source.provider, source.pretrained.config
    spec = getattr(provider, "transformer_layer_spec", None)
    plain = getattr(spec, "func", spec) in (default_layer_spec, get_gpt_decoder_block_spec)
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    latent = provider.multi_latent_attention
    problems = {
        "has layers of its own": type(provider) not in (GPTModelProvider, MLAModelProvider) or not plain,
        f"has positions of kind {rope}": rope not in (("default", "yarn") if latent else ("default",)),
        "has attention within a window": window is not None or provider.window_size is not None,
        f"has {provider.softmax_type} softmax": provider.softmax_type != "vanilla",
        "has another activation than SwiGLU": not provider.gated_linear_unit or provider.activation_func is not silu,
    }
    for problem, is_there in problems.items():
        if is_there:
            raise UsageError(
                f"{FROM} {source.folder}: {source.architecture} {problem}, which Megatron's arguments don't describe "
                "or Bridge leaves out. Train it in Megatron-Bridge, or take another model."
            )


def defaults(source: Source) -> dict[str, Any]:
    """What arguments that the user does not give are: the model's, and its authors' for the training."""
    provider = source.provider
    chosen = {name: getattr(provider, name) for name in _OF_TRAINING}
    folder = str(source.folder)
    tokens = {"tokenizer_type": HUGGING_FACE_TYPE, "tokenizer_model": folder} if _has_tokenizer(source) else {}
    return {**chosen, **tokens, "max_position_embeddings": provider.seq_length, **model_arguments(source)}


def _has_tokenizer(source: Source) -> bool:
    return any((source.folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model"))


def check_given(source: Source, args: argparse.Namespace) -> None:
    """Compares the arguments with the folder.

    Raises:
        UsageError: one contradicts.
    """
    for name, expected, found in contradictions(source, args):
        raise UsageError(
            f"{_flag_of(name)}: expected {expected}, as {source.folder / CONFIG} says, found {found}. Drop the flag, "
            f"or {FROM}."
        )


def contradictions(source: Source, args: argparse.Namespace) -> Iterator[tuple[str, Any, Any]]:
    """Yields the arguments that are another model's: name, what the folder says, what is there."""
    for name, expected in model_arguments(source).items():
        found = getattr(args, name, None)
        if found != expected:
            yield name, expected, found


def check_built(source: Source, config: Any) -> None:
    """Compares the configuration that Megatron makes of the arguments with Bridge's.

    Raises:
        UsageError: they differ in what defines the model.
    """
    for name in _differences(source.provider, config):
        raise UsageError(
            f"{FROM} {source.folder}: expected {name} {getattr(source.provider, name)}, which no argument of "
            f"Megatron's sets; found {getattr(config, name, None)}. Train the model in Megatron-Bridge."
        )


def _differences(provider: Any, config: Any) -> Iterator[str]:
    latent = _OF_LATENT_ATTENTION if provider.multi_latent_attention else ("num_query_groups",)
    for name in (*_SAME, *latent, "num_moe_experts", "gated_linear_unit", "activation_func"):
        if getattr(config, name, None) != getattr(provider, name):
            yield name


def _flag_of(name: str) -> str:
    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    flags: Sequence[str] = next((action.option_strings for action in parser._actions if action.dest == name), ())
    return flags[0] if flags else f"Megatron's argument {name}"
