"""Chooses the plan of a run from its flags, or reads it from the file that they name."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from megatron_lancet.config import AttentionChoice, LancetConfig, PlanChoice
from megatron_lancet.errors import UsageError
from megatron_lancet.plan_words import plan_text
from megatron_lancet.schedule.dispatch import PLAIN
from megatron_lancet.schedule.plan import ChunkDim, DwPolicy, OverlapRange, Plan, fixed_plan
from megatron_lancet.training.plan.attention import check_attention
from megatron_lancet.training.plan.dispatch import FLAG as DISPATCH_FLAG
from megatron_lancet.training.plan.dispatch import dispatch_of_fixed_plan, nodes_of
from megatron_lancet.training.plan.explicit import plan_from_file
from megatron_lancet.training.plan.limits import (
    ChunkedDim,
    chunked_dim,
    routing_over_full_micro_batch,
    sequence_blockers,
    sequence_refusal,
)
from megatron_lancet.training.plan.support import has_all_to_alls, overlap_blockers, own_samples, refuse_unsupported
from megatron_lancet.training.platform.launcher import ranks_per_node

_DEFAULT_NUM_CHUNKS = 2


def choose_plan(args: argparse.Namespace, config: LancetConfig) -> tuple[Plan | None, str]:
    """Chooses the plan of a run, or None for stock modules, and describes the choice and its reason in a line.

    Args:
        args: Megatron's arguments, validated.

    Raises:
        UsageError: the user asks for the overlap, and for something that it does not support.
    """
    check_attention(args, config)
    for feature in config.features:
        feature.check_layers(args, config)
    ranks_per_node(args, config)  # refuses a wrong number, also where no message depends on it
    if isinstance(config.plan, Path):
        plan = plan_from_file(config.plan, args, config)
        refuse_unsupported(args)
        notes = [*_nodes_note(args, config, plan), *_dropout_note(args, plan)]
        return plan, "; ".join([f"{plan_text(plan)} from {config.plan}", *notes])
    if config.plan is PlanChoice.OFF:
        for flag in _flags_that_need_overlap(config):
            raise UsageError(
                f"{flag} needs the overlapping block, but --lancet-plan off asks for stock Megatron modules. Drop one "
                "of the two."
            )
        return None, f"off: stock Megatron modules{_attention_note(config)}"
    if not has_all_to_alls(args):
        chunks = [] if config.num_chunks in (None, 1) else [f"--lancet-num-chunks {config.num_chunks}"]
        for flag in (*chunks, *_flags_that_need_overlap(config)):
            what = "is about" if flag.startswith(DISPATCH_FLAG) else "overlaps"
            raise UsageError(
                f"{flag} {what} the all-to-all of expert parallelism, but there is none: "
                f"--expert-model-parallel-size is {args.expert_model_parallel_size}. Drop the flag."
            )
        line = "nothing to overlap without expert parallelism: stock Megatron modules"
        return None, f"{line}{_attention_note(config)}"
    blockers = overlap_blockers(args, config, validated=True)
    if blockers:
        stock = f"Stock Megatron modules{_attention_note(config)}, nothing is overlapped"
        return None, f"off: {'; '.join(blockers)}. {stock}"
    plan, notes = _plan_by_flags(args, config)
    refuse_unsupported(args)
    return plan, "; ".join([plan_text(plan), *_nodes_note(args, config, plan), *notes, *_dropout_note(args, plan)])


def _attention_note(config: LancetConfig) -> str:
    """Returns a note for stock modules if the user selects torch's fused attention."""
    return " with torch's fused attention" if config.attention is AttentionChoice.SDPA else ""


def _flags_that_need_overlap(config: LancetConfig) -> Iterator[str]:
    """Flags of :func:`choose_plan` that stock modules can't follow."""
    if config.dispatch not in (None, PLAIN):
        yield f"{DISPATCH_FLAG} {config.dispatch}"
    for feature in config.features:
        yield from feature.flags_for_overlap(config)


def _plan_by_flags(args: argparse.Namespace, config: LancetConfig) -> tuple[Plan, list[str]]:
    """Makes a plan from the flags without any measurement, with notes for the user."""
    notes = []
    overlap_range = config.range or OverlapRange.STACK
    needs_chunks = config.asks_for_chunks or not any(one.overlaps_whole(args, config) for one in config.features)
    whole = ", ".join(routing_over_full_micro_batch(args))
    if whole and overlap_range is not OverlapRange.EXPERTS:
        overlap_range = OverlapRange.EXPERTS
        if needs_chunks:
            notes.append(f"chunks start after the gate, because {whole} looks at the full micro-batch")
    blockers = list(sequence_blockers(args, config, overlap_range))
    num_chunks, dim = _chunks(args, config, blockers) if needs_chunks else (1, ChunkDim.BATCH)
    along = chunked_dim(args, config, dim)
    if num_chunks == 1 and config.num_chunks is None and needs_chunks:
        notes += _why_whole(along, blockers, dim)
    elif num_chunks > 1 and along.multiple > 1:
        notes.append(along.why)
    dw_policy = config.dw_policy or DwPolicy.FILL
    if config.dw_memory_mb is not None and dw_policy is DwPolicy.NONE:
        raise UsageError(
            f"--lancet-dw-memory-mb {config.dw_memory_mb:g} bounds deferred weight gradients, but --lancet-dw-policy "
            "none defers none. Drop one of the two."
        )
    multiple = along.multiple if num_chunks > 1 else 1
    dispatch, why_plain = dispatch_of_fixed_plan(args, config)
    notes += why_plain
    plan = fixed_plan(num_chunks, dw_policy, dim, overlap_range, config.dw_memory_bytes, multiple, dispatch)
    for feature in config.features:
        plan, why = feature.in_fixed_plan(plan, args, config)
        notes += why
    return plan, notes


def _why_whole(along: ChunkedDim, blockers: list[str], dim: ChunkDim) -> Iterator[str]:
    """Yields notes on why micro-batches are not cut by default."""
    if along.most_chunks < along.size:
        yield f"a micro-batch of {along.size} {along.units} is not cut, because {along.why}"
    if dim is ChunkDim.BATCH:
        whole = "a micro-batch of 1 is not cut, because " if along.size == 1 else ""
        yield f"{whole}sequence chunks do not work with {blockers[0] if blockers else '--lancet-chunk-dim batch'}"


def _chunks(args: argparse.Namespace, config: LancetConfig, blockers: list[str]) -> tuple[int, ChunkDim]:
    """Chooses the number of chunks and their dimension; without flags two, the smallest number that overlaps.

    Args:
        blockers: flags with which sequence chunks would change the result.
    """
    num_chunks, dim = config.num_chunks or _DEFAULT_NUM_CHUNKS, config.chunk_dim
    if dim is None:
        fits = num_chunks <= chunked_dim(args, config, ChunkDim.BATCH).most_chunks
        dim = ChunkDim.BATCH if fits or blockers else ChunkDim.SEQUENCE
    elif dim is ChunkDim.SEQUENCE and num_chunks > 1 and blockers:
        raise sequence_refusal(blockers[0])
    along = chunked_dim(args, config, dim)
    if config.num_chunks is None:
        return min(num_chunks, along.most_chunks), dim
    if num_chunks > along.most_chunks:
        larger = ", a larger micro-batch" if own_samples(args, config) is None else ""
        why_not = f" (sequence chunks do not work with {blockers[0]})" if blockers else ""
        raise UsageError(
            f"--lancet-num-chunks {num_chunks} is more than the micro-batch can be cut into along the {dim} "
            f"dimension: {along.flag} is {along.size}{', and ' + along.why if along.why else ''}{why_not}. "
            f"Use at most {along.most_chunks} chunk{'s' if along.most_chunks > 1 else ''}"
            + (f"{larger}, or --lancet-chunk-dim auto." if dim is ChunkDim.BATCH else ".")
        )
    return num_chunks, dim


def _nodes_note(args: argparse.Namespace, config: LancetConfig, plan: Plan) -> list[str]:
    return [f"two hops over {nodes_of(args, config)}"] if plan.dispatch.needs_nodes else []


def _dropout_note(args: argparse.Namespace, plan: Plan) -> list[str]:
    segments = (*plan.segments, *plan.at_ends.segments)
    chunked = any(segment.num_chunks > 1 and segment.range.has_attention for segment in segments)
    if chunked and (args.hidden_dropout > 0 or args.attention_dropout > 0):
        return ["dropout draws its random numbers chunk by chunk, so losses differ from stock's by chance"]
    return []
