"""Describes what is profiled: the model and layout as far as a schedule depends on them, device and versions."""

import argparse
import math
import platform
from collections.abc import Iterator
from dataclasses import dataclass, fields
from importlib.metadata import version
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig
from megatron.core.utils import get_te_version

from megatron_lancet import __version__
from megatron_lancet.model.gpt import LanguageModel, overlapping_layers
from megatron_lancet.model.linear import LinearByPlan
from megatron_lancet.model.te.token_multiple import token_multiple
from megatron_lancet.model.transformer_block import LayersByPlan
from megatron_lancet.planning.profile import ModelFacts
from megatron_lancet.profiler.cache import ProfileKey
from megatron_lancet.runtime.collectives import from_all_ranks
from megatron_lancet.runtime.comm import Comm
from megatron_lancet.runtime.rows.packing import RowLayout

_PACKAGES = ("torch", "megatron-core")
_NAMED = (
    ("layers", "num_layers"), ("mtp", "mtp_num_layers"), ("hidden", "hidden_size"), ("ffn", "ffn_hidden_size"),
    ("expert-ffn", "moe_ffn_hidden_size"), ("shared-ffn", "moe_shared_expert_intermediate_size"),
    ("heads", "num_attention_heads"), ("groups", "num_query_groups"), ("kv-channels", "kv_channels"),
    ("experts", "num_moe_experts"),
    ("top", "moe_router_topk"), ("tp", "tensor_model_parallel_size"), ("etp", "expert_tensor_parallel_size"),
    ("cp", "context_parallel_size"), ("pp", "pipeline_model_parallel_size"),
)  # fmt: skip

_SETTINGS = (
    *("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "mla_down_proj_fusion"),
    *("rope_type", "window_size", "window_attn_skip_freq", "attention_output_gate", "qk_layernorm", "qk_l2_norm"),
    *("softmax_type", "no_rope_freq", "attention_dropout", "hidden_dropout", "add_qkv_bias", "apply_rope_fusion"),
    *("fused_single_qkv_rope", "rotary_interleaved", "masked_softmax_fusion", "attention_softmax_in_fp32"),
    *("apply_query_key_layer_scaling", "flash_attention_version", "cp_comm_type", "qk_clip"),
    *("log_max_attention_logit", "moe_expert_capacity_factor", "moe_token_drop_policy", "moe_router_dtype"),
    *("moe_router_fusion", "moe_permute_fusion", "moe_router_load_balancing_type", "moe_router_score_function"),
    *("moe_router_pre_softmax", "moe_router_num_groups", "moe_router_group_topk", "moe_router_enable_expert_bias"),
    *("moe_shared_expert_gate", "moe_apply_probs_on_input", "moe_mlp_glu_interleave_size", "moe_input_jitter_eps"),
    *("moe_router_force_load_balancing", "moe_router_force_biased", "moe_z_loss_coeff", "bias_activation_fusion"),
    *("bias_dropout_fusion", "use_fused_weighted_squared_relu", "activation_func_clamp_value"),
    *("activation_func_fp8_input_store", "persist_layer_norm", "memory_efficient_layer_norm"),
    *("fp32_residual_connection", "gradient_accumulation_fusion", "cross_entropy_loss_fusion"),
    *("cross_entropy_fusion_impl", "deterministic_mode", "disable_bf16_reduced_precision_matmul"),
    *("disable_parameter_transpose_cache", "fp8_param", "fp8_wgrad", "fp8_output_proj", "fp8_dot_product_attention"),
    *("fp8_multi_head_attention", "first_last_layers_bf16", "num_layers_at_start_in_bf16"),
    *("num_layers_at_end_in_bf16", "fp4_param"),
)
"""Settings that change an op's time or memory; the name of a model has those that are not Megatron's default."""


@dataclass(frozen=True)
class ProfiledModel:
    """A running model and the size of its steps.

    Attributes:
        stages: this rank's model chunks, prepared for overlap and without DDP around them.
        device: device of the parameters.
        micro_batch_size: samples in a micro-batch on one rank.
        seq_length: positions of a sample, of all ranks that share them.
        num_micro_batches: micro-batches in a step.
        comm_sms: SMs that an all-to-all may take, at most; None for NCCL's choice.
        attention: ``--lancet-attention``.
    """

    stages: tuple[LanguageModel, ...]
    device: torch.device
    micro_batch_size: int
    seq_length: int
    num_micro_batches: int
    comm_sms: int | None = None
    attention: str = ""

    @property
    def config(self) -> TransformerConfig:
        """Megatron's configuration."""
        return self.stages[0].config

    @property
    def comm(self) -> Comm:
        """The object that launches the model's all-to-alls."""
        return _block(self.stages[0]).comm


def key_of(model: ProfiledModel) -> ProfileKey:
    """Returns the key of this run's profile. Collective over all ranks of the world."""
    bound = f", {model.comm_sms} SMs for messages" if model.comm_sms is not None else ""
    return ProfileKey(model_facts(model), f"{device_name(model.device)}{bound}", package_versions(model))


def model_facts(model: ProfiledModel) -> ModelFacts:
    """Returns the facts of a run. Collective over all ranks of the world."""
    config = model.config
    own = [(layer.number, layer.kind) for stage in model.stages for layer in overlapping_layers(stage)]
    stage = parallel_state.get_pipeline_model_parallel_rank()
    ranks = from_all_ranks((stage, own))
    places = {stage: place for place, stage in enumerate(sorted({stage for stage, layers in ranks if layers}))}
    layers = {number: (kind, places[stage]) for stage, layers in ranks for number, kind in layers}
    assert set(layers) == set(range(1, len(layers) + 1)), layers
    tokens = token_multiple(config)  # of all tensor-parallel ranks
    dtype, num_mtp = config.params_dtype, config.mtp_num_layers or 0
    router_dtype = {"fp32": torch.float32, "fp64": torch.float64}.get(config.moe_router_dtype or "", dtype)
    row, prob = torch.empty(0, config.hidden_size, dtype=dtype), torch.empty(0, dtype=router_dtype)
    return ModelFacts(
        name=_name(model),
        layer_kinds=tuple(layers[number][0] for number in sorted(layers)),
        stage_of_layer=tuple(layers[number][1] for number in sorted(layers)),
        micro_batch_size=model.micro_batch_size,
        seq_length=positions_on_rank(model.seq_length, config),
        num_micro_batches=model.num_micro_batches,
        topk=config.moe_router_topk,
        num_experts=config.num_moe_experts or 0,
        ep_size=parallel_state.get_expert_model_parallel_world_size(),
        world_size=dist.get_world_size(),
        row_bytes=_message_bytes(row, prob),
        combine_row_bytes=_message_bytes(row),
        counts_bytes=(config.num_moe_experts or 0) * torch.int64.itemsize,
        has_shared_experts=config.moe_shared_expert_intermediate_size is not None,
        token_multiple=tokens // math.gcd(tokens, _sharers(config)),
        num_mtp_layers=num_mtp,
        repeats_mtp_layer=num_mtp > 0 and config.mtp_use_repeated_layer,
        num_output_uses=1 if getattr(config, "mtp_detach_heads", False) else 1 + num_mtp,
        pads_to_capacity=config.moe_pad_expert_input_to_capacity,
        prob_bytes=router_dtype.itemsize,
        nodes=model.comm.nodes,
        expert_tp_size=parallel_state.get_expert_tensor_parallel_world_size(),
        wiring=next((layer.wiring for stage in model.stages for layer in overlapping_layers(stage)), ""),
    )


def positions_on_rank(positions: int, settings: argparse.Namespace | TransformerConfig) -> int:
    """Positions of a sample that a rank routes: context and sequence parallelism share them out.

    Args:
        positions: of a sample, of all ranks.
        settings: Megatron's arguments, or the configuration that is made of them.
    """
    return positions // (settings.context_parallel_size * _sharers(settings))


def _sharers(settings: argparse.Namespace | TransformerConfig) -> int:
    return settings.tensor_model_parallel_size if settings.sequence_parallel else 1


def device_name(device: torch.device) -> str:
    """Returns the model name of a device, the same on all ranks of a homogeneous cluster; a CPU's with its threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{models[0] if models else platform.machine()}, {torch.get_num_threads()} threads"


def package_versions(model: ProfiledModel) -> dict[str, str]:
    """Returns the versions of the packages whose kernels and schedules are timed."""
    versions = {package: version(package) for package in _PACKAGES}
    versions["megatron-lancet"] = __version__  # not from metadata: a checkout runs without being installed
    linears = (module for stage in model.stages for module in stage.modules() if isinstance(module, LinearByPlan))
    if any(linear.package == "transformer-engine" for linear in linears):
        versions["transformer-engine"] = str(get_te_version())
    return versions


def _block(stage: LanguageModel) -> LayersByPlan:
    assert isinstance(stage.decoder, LayersByPlan)
    return stage.decoder


def _message_bytes(*tensors: torch.Tensor) -> int:
    """Returns the bytes of one row of tensors that are sent in one message."""
    packed = RowLayout.of(tensors).pack(tensors)
    return packed.element_size() * packed.shape[1:].numel()


def _name(model: ProfiledModel) -> str:
    """Summarises the settings that the ops' times depend on."""
    config = model.config
    vocabulary = getattr(model.stages[0], "vocab_size", None)
    sizes = [f"{label}={value}" for label, name in _NAMED if (value := getattr(config, name)) is not None]
    kinds = [
        str(config.params_dtype).removeprefix("torch."),
        getattr(config.activation_func, "__name__", "activation") + ("-gated" if config.gated_linear_unit else ""),
        config.normalization,
        *(["sequence-parallel"] if config.sequence_parallel else []),
        *(["latent-attention"] if config.multi_latent_attention else []),
        *([f"fp8={config.fp8}-{config.fp8_recipe}"] if config.fp8 else []),
        *([f"fp4={config.fp4}-{config.fp4_recipe}"] if config.fp4 else []),
        *(["bias"] if config.add_bias_linear else []),
        *(["repeated-mtp"] if config.mtp_num_layers and config.mtp_use_repeated_layer else []),
        *([_recompute(config)] if config.recompute_granularity else []),
        *(["grouped-experts"] if config.moe_grouped_gemm else []),
        f"attention={getattr(config.attention_backend, 'name', config.attention_backend)}",
        *([f"lancet-attention={model.attention}"] if model.attention else []),
        *([f"vocabulary={vocabulary}"] if vocabulary else []),
        *_changed(config),
    ]
    return " ".join(["hybrid" if config.is_hybrid_model else "gpt", *sizes, *kinds])


def _changed(config: TransformerConfig) -> Iterator[str]:
    """Yields the settings that have another value than Megatron's default."""
    defaults = {field.name: field.default for field in fields(config)}
    for name in _SETTINGS:
        if name in defaults and (value := getattr(config, name)) != defaults[name]:
            yield f"{name}={value}".replace(" ", "")


def _recompute(config: TransformerConfig) -> str:
    """The settings of recompute."""
    full = (config.recompute_method, config.recompute_num_layers)
    parts = config.recompute_modules if config.recompute_granularity == "selective" else full
    return "-".join(["recompute", config.recompute_granularity, *(str(part) for part in parts or () if part)])
