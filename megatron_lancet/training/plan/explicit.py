"""``--lancet-plan FILE``: the file is read and checked against the run before any process group starts."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from megatron_lancet.config import LancetConfig
from megatron_lancet.errors import UsageError
from megatron_lancet.files import RecordError
from megatron_lancet.planning.plan_file import MadeFor, check_fits, fold_numbers, read_plan_file
from megatron_lancet.schedule.plan import ChunkDim, OverlapRange, Plan, Segment
from megatron_lancet.training.plan.limits import against_sequence_chunks, chunked_size, routing_over_whole_micro_batch


def plan_from_file(path: Path, args: argparse.Namespace, config: LancetConfig) -> Plan:
    """The plan in a file.

    Args:
        args: Megatron's arguments, validated.

    Raises:
        UsageError: the file is no plan file, was made for another model, or the run can't follow it.
    """
    for flag, wish in wishes(config):
        raise UsageError(
            f"{flag} {wish} contradicts --lancet-plan {path}: the file says it already. Drop one of the two."
        )
    try:
        content = read_plan_file(path)
        check_fits(content, model_of_run(args), str(path))
    except RecordError as error:
        raise UsageError(f"--lancet-plan {error}.") from error
    if not args.num_experts or args.expert_model_parallel_size == 1:
        raise UsageError(
            f"--lancet-plan {path} overlaps the all-to-all of expert parallelism, but there is none: "
            f"--expert-model-parallel-size is {args.expert_model_parallel_size}. Drop the flag."
        )
    for segment in content.plan.segments:
        for obstacle in _obstacles(segment, args, config):
            layers = f"layers {segment.first_layer}-{segment.last_layer or 'end'}"
            raise UsageError(f"--lancet-plan {path}: {layers} ({segment}): {obstacle}.")
    return content.plan


def wishes(config: LancetConfig) -> Iterator[tuple[str, object]]:
    """What the user asks of a plan by flags: (flag, value)."""
    asked = {
        "--lancet-num-chunks": config.num_chunks,
        "--lancet-chunk-dim": config.chunk_dim,
        "--lancet-range": config.range,
        "--lancet-dw-policy": config.dw_policy,
        "--lancet-dw-memory-mb": config.dw_memory_mb,
    }
    yield from ((flag, value) for flag, value in asked.items() if value is not None)


def model_of_run(args: argparse.Namespace) -> MadeFor:
    """What a plan must have been made for to fit this run."""
    num_experts = args.num_experts or 0
    freq = args.moe_layer_freq
    pattern = freq if isinstance(freq, list) else [layer % freq == 0 for layer in range(args.num_layers)]
    moe_layers = [number for number, is_moe in enumerate(pattern, start=1) if is_moe and num_experts]
    return MadeFor(
        num_layers=args.num_layers,
        moe_layers=fold_numbers(moe_layers),
        num_stages=args.pipeline_model_parallel_size,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length // args.context_parallel_size,
        num_experts=num_experts,
        topk=args.moe_router_topk,
        ep_size=args.expert_model_parallel_size,
    )


def _obstacles(segment: Segment, args: argparse.Namespace, config: LancetConfig) -> Iterator[str]:
    """Why the run can't cut the micro-batch as a segment wants it."""
    if segment.num_chunks == 1:
        return
    size, flag = chunked_size(args, segment.chunk_dim)
    if segment.num_chunks > size:
        yield f"{flag} is {size}, so at most {size} chunks fit. Make a plan for this run"
    if segment.range is not OverlapRange.EXPERTS:
        for whole in routing_over_whole_micro_batch(args):
            yield f"{whole} looks at the whole micro-batch, so chunks may only start after the gate: range experts"
    if segment.chunk_dim is ChunkDim.SEQUENCE:
        for obstacle in against_sequence_chunks(args, config, segment.range):
            yield f"sequence chunks do not work with {obstacle}. Drop it, or plan without sequence chunks"
