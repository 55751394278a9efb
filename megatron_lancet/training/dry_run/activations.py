"""Estimates, tensor by tensor, the activations that a rank keeps between forward and backward.

The estimate counts the tensors that autograd saves with fused attention (or the score matrices without it), for
balanced routing. It does not count workspaces, buffers of NCCL and of the dispatcher, or fragmentation. Tensors in fp8
count as bf16.

Legend: T tokens of a micro-batch on this rank, s ranks that share the residual stream (tensor parallel size under
sequence parallelism, else 1).
"""

import argparse
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_lancet.schedule.layers import LayerKind
from megatron_lancet.training.dry_run.parameters import is_gated
from megatron_lancet.training.dry_run.stages import ModelChunk, PipelineStage
from megatron_lancet.training.layer_pattern import mtp_layer_kinds
from megatron_lancet.training.plan.support import micro_batch_shape

_FP32_BYTES = 4


@dataclass(frozen=True)
class Saved:
    """A tensor that the backward pass of a layer needs.

    Attributes:
        num_bytes: bytes on a rank, for one micro-batch.
        module: name in ``--recompute-modules`` with which the tensor is recomputed; empty if it is always kept.
        also: a second such name.
    """

    num_bytes: float
    module: str = ""
    also: str = ""


def activation_bytes(
    args: argparse.Namespace,
    stages: list[PipelineStage],
    num_micro_batches: int,
    saves_scores: bool,
    is_paired: bool = False,
) -> list[float]:
    """Peak of activations on a rank of each pipeline stage, in bytes.

    Args:
        args: Megatron's arguments, validated.
        num_micro_batches: micro-batches of a step on a data-parallel rank.
        saves_scores: whether core attention keeps its matrices of scores, as unfused attention does.
        is_paired: whether backwards run beside forwards by a plan; Megatron's own pairing counts in any case.
    """
    pairs = is_paired or args.overlap_moe_expert_parallel_comm
    peaks = []
    for rank, stage in enumerate(stages):
        in_flight = _in_flight(args, len(stages), rank, len(stage.chunks), num_micro_batches, pairs)
        kept_by_layer = [_kept_by_layer(args, chunk, saves_scores) for chunk in stage.chunks]
        kept = sum(sum(layers) * in_flight[i] for i, layers in enumerate(kept_by_layer))
        if pairs and len(stages) == 1:
            # The forward fills its first layers while the backward frees the last ones, and is about a layer ahead.
            kept += max((max(layers, default=0.0) for layers in kept_by_layer), default=0.0)
        peaks.append(kept + _working_bytes(args, stage, saves_scores))
    return peaks


def expert_row_bytes(args: argparse.Namespace) -> float:
    """Bytes that a row of the experts keeps from forward to backward: its token, and the tensors inside the expert.

    A recomputed expert keeps the token only.

    Args:
        args: Megatron's arguments, validated.
    """
    token = (args.moe_latent_size or args.hidden_size) * _value_bytes(args)
    if args.recompute_granularity == "full" or "moe" in (args.recompute_modules or ()):
        return float(token)
    inside = _mlp(args, 1, args.moe_ffn_hidden_size, args.expert_tensor_parallel_size)
    return token + sum(saved.num_bytes for saved in inside)


def _in_flight(
    args: argparse.Namespace, num_stages: int, rank: int, num_chunks: int, num_micro_batches: int, pairs: bool
) -> Counter[int]:
    """Counts the micro-batches of each virtual stage whose activations are kept at the same time, at most.

    In Megatron's 1F1B schedule a rank runs forwards until the gradient of its first one arrives, and then alternates.

    Args:
        pairs: whether forwards run beside backwards, which are of other virtual stages, so one more is needed.
    """
    if num_chunks == 1:
        return Counter({0: min(num_micro_batches, num_stages - rank)})
    group = args.microbatch_group_size_per_vp_stage or num_stages
    ahead = (num_stages - rank - 1) * 2 + (num_chunks - 1) * group + 1
    if pairs:
        ahead += 1
    order: Iterator[int] = (
        chunk
        for start in range(0, num_micro_batches, group)
        for chunk in range(num_chunks)
        for _ in range(start, min(start + group, num_micro_batches))
    )
    return Counter(chunk for _, chunk in zip(range(ahead), order, strict=False))


def _kept_by_layer(args: argparse.Namespace, chunk: ModelChunk, saves_scores: bool) -> list[float]:
    """Bytes that each layer of a virtual stage keeps of one micro-batch between its forward and its backward."""
    layers = [*chunk.layers, *(mtp_layer_kinds(args) * chunk.num_mtp if chunk.num_mtp else [])]
    if args.recompute_granularity == "full":
        num_recomputed, per_input = len(layers), 1
        if args.recompute_method == "uniform":
            per_input = args.recompute_num_layers or 1
        elif args.recompute_method == "block":
            num_recomputed = min(len(layers), args.recompute_num_layers or 0)
        input_shards = args.tensor_model_parallel_size if args.distribute_saved_activations else 1
        input_bytes = _residual_bytes(args) / input_shards
        inputs = [0.0 if index % per_input else input_bytes for index in range(num_recomputed)]
        return [*inputs, *(_layer_bytes(args, kind, saves_scores) for kind in layers[num_recomputed:])]
    dropped = _dropped_modules(args)
    return [_layer_bytes(args, kind, saves_scores, dropped) for kind in layers]


def _working_bytes(args: argparse.Namespace, stage: PipelineStage, saves_scores: bool) -> float:
    """Bytes that exist for one micro-batch at a time: those of the output layer, and those of recomputed layers."""
    working = 0.0
    for chunk in stage.chunks:
        if chunk.has_output or chunk.num_mtp:
            # Each loss has logits in the model's type and their softmax in fp32.
            logits = _tokens(args) * args.padded_vocab_size / args.tensor_model_parallel_size
            num_losses = chunk.has_output + chunk.num_mtp
            working += num_losses * (logits * (_value_bytes(args) + _FP32_BYTES) + 2 * _residual_bytes(args))
    kinds = set(stage.layers)
    if not kinds or args.recompute_granularity is None:
        return working
    whole = max(_layer_bytes(args, kind, saves_scores) for kind in kinds)
    if args.recompute_granularity == "full":
        unit = args.recompute_num_layers if args.recompute_method == "uniform" else 1
        return working + whole * min(unit or 1, len(stage.layers))
    dropped = _dropped_modules(args)
    return working + max(
        _layer_bytes(args, kind, saves_scores) - _layer_bytes(args, kind, saves_scores, dropped) for kind in kinds
    )


def _dropped_modules(args: argparse.Namespace) -> frozenset[str]:
    return frozenset(args.recompute_modules or ()) if args.recompute_granularity == "selective" else frozenset()


def _layer_bytes(
    args: argparse.Namespace, kind: LayerKind, saves_scores: bool, dropped: frozenset[str] = frozenset()
) -> float:
    """Bytes that a layer saves for one micro-batch, without those of recomputed modules."""
    return sum(
        saved.num_bytes
        for saved in layer_tensors(args, kind, saves_scores)
        if saved.module not in dropped and saved.also not in dropped
    )


def layer_tensors(args: argparse.Namespace, kind: LayerKind, saves_scores: bool) -> Iterator[Saved]:
    """Yields the tensors that a layer saves for one micro-batch; small ones are left out."""
    residual = _residual_bytes(args)
    num_parts = kind.has_attention + (kind.has_experts or kind.has_mlp)
    yield Saved(num_parts * residual)  # inputs of the norms
    # Their outputs; elsewhere layers of Transformer Engine have a norm inside the linear layer that reads it.
    if kind.has_attention:
        yield Saved(residual, "layernorm" if args.multi_latent_attention else "")
    if kind.has_experts or kind.has_mlp:
        yield Saved(residual, "layernorm" if kind.has_experts else "")
    if args.hidden_dropout > 0:
        yield Saved(num_parts * residual / _value_bytes(args))  # masks of one byte
    if kind.has_attention:
        yield from _latent_attention(args) if args.multi_latent_attention else _attention(args)
    if kind.has_attention and saves_scores:
        # Softmax, and with dropout its mask and result: [samples, heads, positions of this rank, positions].
        heads = args.num_attention_heads / args.tensor_model_parallel_size
        per_score = _value_bytes(args) + (1 + _value_bytes(args) if args.attention_dropout > 0 else 0)
        yield Saved(_tokens(args) * heads * args.seq_length * per_score, "core_attn")
    if kind.has_experts:
        yield from _moe(args)
    if kind.has_mlp:
        for saved in _mlp(args, _tokens(args), args.ffn_hidden_size, args.tensor_model_parallel_size):
            yield Saved(saved.num_bytes, "mlp")


def _value_bytes(args: argparse.Namespace) -> int:
    return 2 if args.bf16 or args.fp16 else _FP32_BYTES


def _tokens(args: argparse.Namespace) -> float:
    return math.prod(micro_batch_shape(args)) / args.context_parallel_size


def _residual_bytes(args: argparse.Namespace) -> float:
    """Size of a tensor in the residual stream: [T / s, hidden size]."""
    ranks = args.tensor_model_parallel_size if args.sequence_parallel else 1
    return _tokens(args) * args.hidden_size * _value_bytes(args) / ranks


def _attention(args: argparse.Namespace) -> Iterator[Saved]:
    """Queries, keys, values, and the output of core attention."""
    per_value = _tokens(args) * _value_bytes(args) / args.tensor_model_parallel_size
    query = args.kv_channels * args.num_attention_heads
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    yield Saved(per_value * (query + 2 * args.kv_channels * groups))
    yield Saved(per_value * query)


def _latent_attention(args: argparse.Namespace) -> Iterator[Saved]:
    """Compressed queries and keys before and after their norms, their projections, and the output."""
    per_value = _tokens(args) * _value_bytes(args)
    ranks = args.tensor_model_parallel_size if args.sequence_parallel else 1
    compressed = (args.q_lora_rank or 0) + args.kv_lora_rank
    yield Saved(per_value * (compressed + args.qk_pos_emb_head_dim) / ranks)
    yield Saved(per_value * compressed / ranks, "mla_up_proj")  # after their norms
    heads = args.num_attention_heads / args.tensor_model_parallel_size
    query = args.qk_head_dim + args.qk_pos_emb_head_dim
    yield Saved(per_value * heads * (2 * query + args.v_head_dim), "mla_up_proj")
    yield Saved(per_value * heads * args.v_head_dim)


def _mlp(args: argparse.Namespace, rows: float, ffn: int, num_shards: int) -> Iterator[Saved]:
    """Tensors between the two linear layers, before and after the activation function, with unfused gates' factors."""
    inner = rows * ffn * _value_bytes(args) / num_shards
    fused = args.bias_swiglu_fusion if args.swiglu else True
    yield Saved(inner * ((2 if fused else 3) if is_gated(args) else 1))
    yield Saved(inner)


def _moe(args: argparse.Namespace) -> Iterator[Saved]:
    """The router's scores, the rows that the experts received, tensors inside the experts, and the shared expert."""
    ranks = args.tensor_model_parallel_size if args.sequence_parallel else 1
    yield Saved(2 * _tokens(args) / ranks * args.num_experts * _FP32_BYTES, "moe")
    rows = _tokens(args) / ranks * args.moe_router_topk * args.expert_tensor_parallel_size
    rows *= args.moe_expert_capacity_factor or 1
    yield Saved(rows * (args.moe_latent_size or args.hidden_size) * _value_bytes(args), "moe")
    before, after = _mlp(args, rows, args.moe_ffn_hidden_size, args.expert_tensor_parallel_size)
    yield Saved(before.num_bytes, "moe")
    yield Saved(after.num_bytes, "moe", "moe_act")
    shared = args.moe_shared_expert_intermediate_size
    if shared:
        for saved in _mlp(args, _tokens(args), shared, args.tensor_model_parallel_size):
            yield Saved(saved.num_bytes, "moe", "shared_experts")
