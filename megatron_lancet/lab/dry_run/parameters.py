"""Counts the parameters of the model, and those that a rank holds, weight by weight from the arguments.

Megatron's own ``compute_weight_and_optimizer_memory`` spreads layers evenly over the pipeline and leaves out biases,
query and key norms and the projection of multi-token prediction. Tests compare the counts with models that Megatron
builds, and with that function where it is exact.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_lancet.lab.dry_run.stages import PipelineStage
from megatron_lancet.planning.sizes.saved_tensors import is_gated
from megatron_lancet.schedule.layers import LayerKind
from megatron_lancet.training.layer_pattern import mtp_layer_kinds


@dataclass(frozen=True)
class Weight:
    """One weight of a layer, or the same weight of all its experts.

    Attributes:
        numel: number of elements in the full model.
        num_shards: number of parts that it is split into, one on a rank.
        is_expert: whether its gradient is reduced among the ranks that hold the same experts.
        active_share: share of the elements that one token uses.
    """

    numel: int
    num_shards: int = 1
    is_expert: bool = False
    active_share: float = 1.0


@dataclass(frozen=True)
class Held:
    """Numbers of parameters that a rank holds: dense weights, and weights of its experts."""

    dense: int
    expert: int

    @property
    def all(self) -> int:
        """Number of all parameters."""
        return self.dense + self.expert


@dataclass(frozen=True)
class ModelSize:
    """Numbers of parameters of the model.

    Attributes:
        total: parameters; a weight that two pipeline stages hold counts once.
        active: parameters that one token uses.
        held: parameters on a rank of each pipeline stage.
    """

    total: int
    active: int
    held: tuple[Held, ...]


def model_size(args: argparse.Namespace, stages: list[PipelineStage]) -> ModelSize:
    """Counts the parameters, from validated arguments with ``padded_vocab_size``."""
    shared = not args.untie_embeddings_and_output_weights
    weights: list[Weight] = []
    held: list[Held] = []
    for stage in stages:
        own: list[Weight] = []
        for chunk in stage.chunks:
            for kind in chunk.layers:
                own += layer_weights(args, kind)
            for _ in range(min(chunk.num_mtp, 1) if args.mtp_use_repeated_layer else chunk.num_mtp):
                own += _mtp_weights(args)
            if chunk.has_embedding:
                own += _embedding_weights(args)
            if chunk.has_final_norm:
                own += [Weight(_norm(args, args.hidden_size))]
            if chunk.has_output and not shared:
                own += [_vocabulary(args)]
        weights += own
        on_rank = [*own, *_copies(args, stage)]
        dense = sum(weight.numel // weight.num_shards for weight in on_rank if not weight.is_expert)
        held.append(Held(dense, sum(weight.numel // weight.num_shards for weight in on_rank if weight.is_expert)))
    total = sum(weight.numel for weight in weights)
    active = round(sum(weight.numel * weight.active_share for weight in weights))
    return ModelSize(total, active, tuple(held))


def _copies(args: argparse.Namespace, stage: PipelineStage) -> Iterator[Weight]:
    """Yields the weights of other stages of which this stage holds a copy: the embedding."""
    has_embedding = any(chunk.has_embedding for chunk in stage.chunks)
    for chunk in stage.chunks:
        if chunk.num_mtp and not has_embedding:
            yield from _embedding_weights(args)
            has_embedding = True
        if chunk.has_output and not args.untie_embeddings_and_output_weights and not chunk.has_embedding:
            yield _vocabulary(args)  # also beside the embedding of predictions


def _norm(args: argparse.Namespace, size: int) -> int:
    return size if args.normalization == "RMSNorm" else 2 * size


def _vocabulary(args: argparse.Namespace) -> Weight:
    return Weight(args.padded_vocab_size * args.hidden_size, args.tensor_model_parallel_size)


def _embedding_weights(args: argparse.Namespace) -> Iterator[Weight]:
    yield _vocabulary(args)
    if args.position_embedding_type == "learned_absolute":
        yield Weight(args.max_position_embeddings * args.hidden_size)


def _mtp_weights(args: argparse.Namespace) -> Iterator[Weight]:
    """A layer of multi-token prediction: three norms, the projection of two inputs into one, the layers inside."""
    yield Weight(3 * _norm(args, args.hidden_size))
    yield Weight(2 * args.hidden_size * args.hidden_size, args.tensor_model_parallel_size)
    for kind in mtp_layer_kinds(args):
        yield from layer_weights(args, kind)


def layer_weights(args: argparse.Namespace, kind: LayerKind) -> Iterator[Weight]:
    """Yields the weights of a layer."""
    if kind.has_attention:
        yield Weight(_norm(args, args.hidden_size))
        yield from _latent_attention(args) if args.multi_latent_attention else _attention(args)
    if kind.has_experts or kind.has_mlp:
        yield Weight(_norm(args, args.hidden_size))
    if kind.has_experts:
        yield from _moe(args)
    if kind.has_mlp:
        yield from _mlp(args, args.hidden_size, args.ffn_hidden_size, args.tensor_model_parallel_size)


def _attention(args: argparse.Namespace) -> Iterator[Weight]:
    tp_size = args.tensor_model_parallel_size
    query = args.kv_channels * args.num_attention_heads
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    projected = query + 2 * args.kv_channels * groups + (query if args.attention_output_gate else 0)
    yield Weight(args.hidden_size * projected, tp_size)
    if args.add_bias_linear or args.add_qkv_bias:
        yield Weight(projected, tp_size)
    yield Weight(query * args.hidden_size, tp_size)
    if args.add_bias_linear:
        yield Weight(args.hidden_size)
    if _has_query_norms(args):
        yield Weight(2 * _norm(args, args.kv_channels))


def _has_query_norms(args: argparse.Namespace) -> bool:
    """Whether ``--qk-layernorm`` has an effect: the layers of hybrid models have no such norms."""
    return args.qk_layernorm and args.hybrid_layer_pattern is None


def _latent_attention(args: argparse.Namespace) -> Iterator[Weight]:
    """Multi-latent attention. Transformer Engine keeps two down projections whole on each tensor-parallel rank; one for
    both is cut.
    """
    tp_size, heads = args.tensor_model_parallel_size, args.num_attention_heads
    down_shards = tp_size if args.transformer_impl == "local" or args.mla_down_proj_fusion else 1
    query = heads * (args.qk_head_dim + args.qk_pos_emb_head_dim)
    if args.q_lora_rank is None:
        yield Weight(args.hidden_size * query, tp_size)
    else:
        yield Weight(args.hidden_size * args.q_lora_rank, down_shards)
        yield Weight(args.q_lora_rank * query, tp_size)
    yield Weight(args.hidden_size * (args.kv_lora_rank + args.qk_pos_emb_head_dim), down_shards)
    yield Weight(args.kv_lora_rank * heads * (args.qk_head_dim + args.v_head_dim), tp_size)
    yield Weight(heads * args.v_head_dim * args.hidden_size, tp_size)
    if args.add_bias_linear:
        yield Weight(args.hidden_size)
    if _has_query_norms(args):
        # Without compressed queries Transformer Engine normalises the input of their projection.
        yield Weight(_norm(args, args.kv_lora_rank + (args.q_lora_rank or args.hidden_size)))


def _mlp(args: argparse.Namespace, hidden: int, ffn: int, tp_size: int) -> Iterator[Weight]:
    inner = ffn * (2 if is_gated(args) else 1)
    yield Weight(hidden * inner, tp_size)
    yield Weight(ffn * hidden, tp_size)
    if args.add_bias_linear:
        yield Weight(inner, tp_size)
        yield Weight(hidden)


def _moe(args: argparse.Namespace) -> Iterator[Weight]:
    num_experts, hidden = args.num_experts, args.hidden_size
    yield Weight(num_experts * hidden)
    if args.add_bias_linear:
        yield Weight(num_experts)
    routed_hidden = args.moe_latent_size or hidden
    if args.moe_latent_size:
        yield Weight(2 * hidden * routed_hidden + (hidden + routed_hidden if args.add_bias_linear else 0))
    ep_size, active = args.expert_model_parallel_size, args.moe_router_topk / num_experts
    for one in _mlp(args, routed_hidden, args.moe_ffn_hidden_size, args.expert_tensor_parallel_size):
        yield Weight(one.numel * num_experts, one.num_shards * ep_size, True, active)
    shared = args.moe_shared_expert_intermediate_size
    if shared:
        yield from _mlp(args, hidden, shared, args.tensor_model_parallel_size)
        if args.moe_shared_expert_gate:
            yield Weight(hidden)
