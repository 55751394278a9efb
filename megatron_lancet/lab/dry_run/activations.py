"""Estimates the activations that a rank keeps between forward and backward, from the tensors that its layers save."""

import argparse
from collections import Counter
from collections.abc import Iterator

from megatron_lancet.lab.dry_run.stages import ModelChunk, PipelineStage
from megatron_lancet.planning.sizes.saved_tensors import FP32_BYTES, layer_tensors, residual_bytes, tokens, value_bytes
from megatron_lancet.schedule.layers import LayerKind
from megatron_lancet.training.layer_pattern import mtp_layer_kinds


def activation_bytes(
    args: argparse.Namespace,
    stages: list[PipelineStage],
    num_micro_batches: int,
    saves_scores: bool,
    is_paired: bool = False,
    by_plan: bool = False,
) -> list[float]:
    """Peak of activations on a rank of each pipeline stage, in bytes.

    Args:
        args: Megatron's arguments, validated.
        num_micro_batches: micro-batches of a step on a data-parallel rank.
        saves_scores: whether core attention keeps its matrices of scores, as unfused attention does.
        is_paired: whether backwards are paired with forwards by a plan; Megatron's own pairing counts in any case.
        by_plan: whether the layers run by a plan, which recomputes what lies between two collectives.
    """
    pairs = is_paired or args.overlap_moe_expert_parallel_comm
    peaks = []
    for rank, stage in enumerate(stages):
        in_flight = _in_flight(args, len(stages), rank, len(stage.chunks), num_micro_batches, pairs)
        kept_by_layer = [_kept_by_layer(args, chunk, saves_scores, by_plan) for chunk in stage.chunks]
        kept = sum(sum(layers) * in_flight[i] for i, layers in enumerate(kept_by_layer))
        if pairs and len(stages) == 1:
            # The forward fills its first layers while the backward frees the last ones, and is about a layer ahead.
            kept += max((max(layers, default=0.0) for layers in kept_by_layer), default=0.0)
        peaks.append(kept + _working_bytes(args, stage, saves_scores, by_plan))
    return peaks


def _in_flight(
    args: argparse.Namespace, num_stages: int, rank: int, num_chunks: int, num_micro_batches: int, pairs: bool
) -> Counter[int]:
    """Counts the micro-batches of each virtual stage whose activations are kept at the same time, at most.

    In Megatron's 1F1B schedule a rank runs forwards until the gradient of its first one arrives, and then alternates.

    Args:
        pairs: whether forwards are paired with backwards, which are of other virtual stages, so one more is needed.
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


def _kept_by_layer(args: argparse.Namespace, chunk: ModelChunk, saves_scores: bool, by_plan: bool) -> list[float]:
    """Bytes that each layer of a virtual stage keeps of one micro-batch between its forward and its backward."""
    layers = [*chunk.layers, *(mtp_layer_kinds(args) * chunk.num_mtp if chunk.num_mtp else [])]
    if args.recompute_granularity == "full":
        num_recomputed, per_input = len(layers), 1
        if args.recompute_method == "uniform" and not by_plan:
            per_input = args.recompute_num_layers or 1
        elif args.recompute_method == "block":
            num_recomputed = min(len(layers), args.recompute_num_layers or 0)
        input_shards = args.tensor_model_parallel_size if args.distribute_saved_activations else 1
        input_bytes = residual_bytes(args) / input_shards
        inputs = [0.0 if index % per_input else input_bytes for index in range(num_recomputed)]
        if by_plan:
            inputs = [_kept_of_recomputed(args, kind) for kind in layers[:num_recomputed]]
        return [*inputs, *(_layer_bytes(args, kind, saves_scores) for kind in layers[num_recomputed:])]
    dropped = _dropped_modules(args)
    return [_layer_bytes(args, kind, saves_scores, dropped, by_plan) for kind in layers]


def _kept_of_recomputed(args: argparse.Namespace, kind: LayerKind) -> float:
    """Bytes that a plan keeps of a layer that is recomputed as a whole: its input, the router's, and what is sent."""
    kept = sum(saved.num_bytes for saved in layer_tensors(args, kind, False) if saved.is_kept_by_plans)
    return kept + residual_bytes(args) * (1 + (kind.has_attention and kind.has_experts))


def _working_bytes(args: argparse.Namespace, stage: PipelineStage, saves_scores: bool, by_plan: bool) -> float:
    """Bytes that exist for one micro-batch at a time: of the output layer, and of recomputed layers."""
    working = 0.0
    for chunk in stage.chunks:
        if chunk.has_output or chunk.num_mtp:
            # Each loss has logits in the model's type and their softmax in fp32.
            logits = tokens(args) * args.padded_vocab_size / args.tensor_model_parallel_size
            num_losses = chunk.has_output + chunk.num_mtp
            working += num_losses * (logits * (value_bytes(args) + FP32_BYTES) + 2 * residual_bytes(args))
    kinds = set(stage.layers)
    if not kinds or args.recompute_granularity is None:
        return working
    whole = max(_layer_bytes(args, kind, saves_scores) for kind in kinds)
    if args.recompute_granularity == "full" and by_plan:
        return working + max(_layer_bytes(args, kind, saves_scores) - _kept_of_recomputed(args, kind) for kind in kinds)
    if args.recompute_granularity == "full":
        unit = args.recompute_num_layers if args.recompute_method == "uniform" else 1
        return working + whole * min(unit or 1, len(stage.layers))
    dropped = _dropped_modules(args)
    return working + max(
        _layer_bytes(args, kind, saves_scores) - _layer_bytes(args, kind, saves_scores, dropped, by_plan)
        for kind in kinds
    )


def _dropped_modules(args: argparse.Namespace) -> frozenset[str]:
    return frozenset(args.recompute_modules or ()) if args.recompute_granularity == "selective" else frozenset()


def _layer_bytes(
    args: argparse.Namespace,
    kind: LayerKind,
    saves_scores: bool,
    dropped: frozenset[str] = frozenset(),
    by_plan: bool = False,
) -> float:
    """Bytes that a layer saves for one micro-batch, without recomputed modules."""
    return sum(
        saved.num_bytes
        for saved in layer_tensors(args, kind, saves_scores)
        if (by_plan and saved.is_kept_by_plans) or (saved.module not in dropped and saved.also not in dropped)
    )
