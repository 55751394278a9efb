"""``--lancet-plan FILE``: reads the file and checks it against the run before any process group starts."""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_lancet.config import AttentionChoice, LancetConfig
from megatron_lancet.errors import UsageError
from megatron_lancet.files.reader import RecordError
from megatron_lancet.planning.plan_file import MadeFor, check_fits, read_plan_file
from megatron_lancet.profiler.facts import positions_on_rank
from megatron_lancet.schedule.chunk_sizes import most_chunks
from megatron_lancet.schedule.layers import pattern_of
from megatron_lancet.schedule.plan import ChunkDim, OverlapRange, Plan, Segment
from megatron_lancet.schedule.ranges import ranges
from megatron_lancet.training.layer_pattern import layer_kinds
from megatron_lancet.training.plan.dispatch import refusal_of
from megatron_lancet.training.plan.limits import chunked_dim, routing_over_full_micro_batch, sequence_blockers
from megatron_lancet.training.plan.support import has_all_to_alls, micro_batch_shape


def plan_from_file(path: Path, args: argparse.Namespace, config: LancetConfig) -> Plan:
    """Reads the plan in a file.

    Args:
        args: Megatron's arguments, validated.

    Raises:
        UsageError: the file is no plan file, was made for another model, or the run can't follow it.
    """
    for flag, value in config.explicit_plan_flags().items():
        raise UsageError(f"{flag} {value} contradicts --lancet-plan {path}: the file sets it. Drop one of the two.")
    try:
        content = read_plan_file(path)
        check_fits(content, model_of_run(args, config), str(path))
    except RecordError as error:
        raise UsageError(f"--lancet-plan {error}.") from error
    if not has_all_to_alls(args):
        raise UsageError(
            f"--lancet-plan {path} overlaps the all-to-all of expert parallelism, but there is none: "
            f"--expert-model-parallel-size is {args.expert_model_parallel_size}. Drop the flag."
        )
    if content.plan.fused_attention and config.attention is AttentionChoice.STOCK:
        raise UsageError(
            f"--lancet-attention stock contradicts --lancet-plan {path}: the file sets fused_attention. Drop one of "
            "the two."
        )
    _check_segments(content.plan.segments, "", path, args, config)
    if content.plan.is_paired:
        _check_segments(content.plan.at_ends.segments, " at the ends of a step", path, args, config)
    for feature in config.features:
        feature.check_file(content.plan, path, args, config)
    refusal = refusal_of(args, config, content.plan.dispatch, "make a plan for this run")
    if refusal is not None:
        how = content.plan.dispatch.refusal
        raise UsageError(f"--lancet-plan {path} {how}, which is not possible here: {refusal}")
    return content.plan


def model_of_run(args: argparse.Namespace, config: LancetConfig) -> MadeFor:
    """Model and layout of this run, to be compared with a plan file's."""
    samples, positions = micro_batch_shape(args, config)
    num_mtp, kinds = args.mtp_num_layers or 0, layer_kinds(args)
    kinds += kinds[-1:] * num_mtp  # like the last layer
    moe_layers = [number for number, kind in enumerate(kinds, start=1) if kind.has_experts]
    return MadeFor(
        num_layers=len(kinds),
        moe_layers=ranges(moe_layers),
        num_stages=args.pipeline_model_parallel_size,
        micro_batch_size=samples,
        seq_length=positions_on_rank(positions, args),
        num_experts=args.num_experts or 0,
        topk=args.moe_router_topk,
        ep_size=args.expert_model_parallel_size,
        num_mtp_layers=num_mtp,
        pattern=pattern_of(kinds),
    )


def _check_segments(
    segments: Sequence[Segment], where: str, path: Path, args: argparse.Namespace, config: LancetConfig
) -> None:
    """
    Args:
        where: which micro-batches the segments are for, if not for all.

    Raises:
        UsageError: the run can't cut its micro-batches as a segment asks.
    """
    for segment in segments:
        for blocker in _segment_blockers(segment, args, config):
            layers = f"layers {segment.first_layer}-{segment.last_layer or 'end'}{where}"
            raise UsageError(f"--lancet-plan {path}: {layers} ({segment}): {blocker}.")


def _segment_blockers(segment: Segment, args: argparse.Namespace, config: LancetConfig) -> Iterator[str]:
    """Reasons why the run can't cut its micro-batches as a segment asks, each with what to change."""
    if segment.num_chunks == 1:
        return
    along = chunked_dim(args, config, segment.chunk_dim)
    fitting = most_chunks(along.size, segment.chunk_multiple)
    if segment.num_chunks > fitting:
        most = f"{fitting} chunk" + "s" * (fitting > 1)
        yield f"{along.flag} is {along.size}, so at most {most} fit. Make a plan for this run"
    elif any(size % along.multiple for size in segment.chunk_sizes(along.size)):
        sizes = ", ".join(map(str, segment.chunk_sizes(along.size)))
        yield f"its chunks have {sizes} {along.units}, and {along.why}. Make a plan for this run"
    if segment.range is not OverlapRange.EXPERTS:
        for whole in routing_over_full_micro_batch(args):
            yield f"{whole} looks at the full micro-batch, so chunks may only start after the gate: range experts"
    if segment.chunk_dim is ChunkDim.SEQUENCE:
        for blocker in sequence_blockers(args, config, segment.range):
            yield f"sequence chunks do not work with {blocker}. Drop it, or plan without sequence chunks"
