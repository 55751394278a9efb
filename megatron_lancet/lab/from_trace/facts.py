"""Sizes of the model and the layout, from the shapes and the process groups of a trace."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from megatron_lancet.lab.from_trace.events import Event, RankEvents
from megatron_lancet.lab.from_trace.forward import TOPK, no_all_to_all, read_forward
from megatron_lancet.lab.from_trace.lacks import TraceLacks, damage_refused
from megatron_lancet.lab.from_trace.passes import micro_batches, num_stages_of, stage_of
from megatron_lancet.lab.from_trace.step import TracedStep, expert_group
from megatron_lancet.planning.profile import ModelFacts, packed_row_bytes
from megatron_lancet.schedule.layers import LayerKind
from megatron_lancet.schedule.ops import FIRST_DISPATCHES, Op, OpKind

_COUNT_BYTES = 8
_EXPERT_TP = "EXPERT_TENSOR_PARALLEL"


def check_layout(rank: RankEvents) -> None:
    """
    Raises:
        TraceLacks: experts were split over ranks, so messages other than rows are in their ops.
    """
    if (size := rank.group_size(_EXPERT_TP)) > 1:
        raise TraceLacks(
            rank.path,
            f"{size} ranks in a group {_EXPERT_TP}, whose gathers of rows cannot be separated from the experts' "
            "compute",
            "Record with --expert-tensor-parallel-size 1, or install the package and profile with lancet plan profile",
        )


@dataclass(frozen=True)
class RunLayers:
    """The layers of a run.

    Attributes:
        kinds: of all layers, in order.
        stages: pipeline stage of each layer, from 0.
        first_layers: by stage, the number of the first layer of each of its parts; see :class:`MicroBatch`.
    """

    kinds: tuple[LayerKind, ...]
    stages: tuple[int, ...]
    first_layers: Mapping[int, tuple[int, ...]]


def layers_of_run(ranks: Mapping[int, RankEvents]) -> RunLayers:
    """The layers of all stages, from the first step of one rank of each.

    Raises:
        TraceLacks: no rank of a stage was recorded, or the stages don't fit together.
    """
    of_stage = {stage_of(ranks[rank]): ranks[rank] for rank in sorted(ranks, reverse=True)}
    first = ranks[min(ranks)]
    missing = [stage for stage in range(num_stages_of(first)) if stage not in of_stage]
    if missing:
        raise TraceLacks(
            first.path,
            f"{num_stages_of(first)} pipeline stages, and no trace is of stage {', '.join(map(str, missing))} (from 0)",
            "Record one expert-parallel group of each stage (--profile-ranks), and pass all traces",
        )
    num_parts = 1 + max(batch.part for batch in micro_batches(of_stage[0], of_stage[0].steps[0], None))
    kinds: list[LayerKind] = []
    stages: list[int] = []
    first_layers: dict[int, tuple[int, ...]] = {}
    for part in range(num_parts):
        for stage, rank in sorted(of_stage.items()):
            with damage_refused(Path(rank.path)):
                batches = micro_batches(rank, rank.steps[0], num_parts)
                batch = next(batch for batch in batches if batch.part == part)
                own = read_forward(rank.path, batch).layer_kinds
            first_layers[stage] = (*first_layers.get(stage, ()), len(kinds) + 1)
            kinds += own
            stages += [stage] * len(own)
    return RunLayers(tuple(kinds), tuple(stages), first_layers)


def model_facts(ranks: Mapping[int, RankEvents], steps: Mapping[int, TracedStep], layers: RunLayers) -> ModelFacts:
    """The facts of a run.

    Args:
        steps: one step of each rank.

    Raises:
        TraceLacks: shapes are not there, or the run dropped or padded tokens.
    """
    begins = next(rank for rank in sorted(ranks) if stage_of(ranks[rank]) == 0)
    batches = [batch for batch in steps[begins].batches if batch.has_embedding]
    samples = _sizes(ranks[begins].path, batches[0].forward[0], 1)[0]
    found = (rank for rank in sorted(ranks) if any(forward.calls for forward in steps[rank].forwards))
    number = next(found, None)
    if number is None:
        raise no_all_to_all(ranks[begins].path)
    rank, step = ranks[number], steps[number]
    forward, batch = next(pair for pair in zip(step.forwards, step.batches, strict=True) if pair[0].calls)
    calls = forward.calls[min(forward.calls)]
    until_us = calls.dispatches[0].launch.start_us
    choices = [op for op in batch.forward if op.name == TOPK and calls.router.start_us <= op.start_us < until_us]
    if not choices:
        raise TraceLacks(rank.path, f"no {TOPK} behind a router", "Record without --moe-router-fusion")
    tokens, num_experts, topk = _choice(rank.path, choices[-1])
    rows = [one for one in step.sent if Op.parse(one.name).kind in FIRST_DISPATCHES]
    if sum(rows[0].sent_rows) != tokens * topk:
        raise TraceLacks(
            rank.path,
            f"a dispatch of {sum(rows[0].sent_rows)} rows for {tokens} tokens with {topk} experts each",
            "Record without --moe-expert-capacity-factor",
        )
    hidden_bytes = rows[0].row_bytes
    prob_bytes = rows[1].row_bytes if len(calls.dispatches) > 1 else 4
    dispatched = packed_row_bytes(hidden_bytes, prob_bytes)
    hidden = prod(_sizes(rank.path, calls.dispatches[0].launch, 1)[1:])
    return ModelFacts(
        name=f"from a trace: layers={len(layers.kinds)} hidden={hidden} experts={num_experts} top={topk}",
        layer_kinds=layers.kinds,
        stage_of_layer=layers.stages,
        micro_batch_size=samples,
        seq_length=tokens // samples,
        num_micro_batches=len(batches),
        topk=topk,
        num_experts=num_experts,
        ep_size=len(expert_group(rank)),
        world_size=rank.world_size,
        row_bytes=dispatched,
        combine_row_bytes=packed_row_bytes(hidden_bytes),
        counts_bytes=num_experts * _COUNT_BYTES,
        has_shared_experts=any(
            Op.parse(name).kind == OpKind.SHARED_EXPERTS
            for one in steps.values()
            for name in one.parts
            if Op.find(name)
        ),
        prob_bytes=prob_bytes,
    )


def _choice(path: str, choice: Event) -> tuple[int, int, int]:
    """Tokens, experts and experts of a token, from the call that chooses them."""
    *tokens, num_experts = _sizes(path, choice, 0)
    if len(choice.scalars) < 2 or not choice.scalars[1].isdigit():
        raise TraceLacks(path, f"no arguments of {TOPK}")
    return prod(tokens), num_experts, int(choice.scalars[1])


def _sizes(path: str, event: Event, place: int) -> list[int]:
    sizes = event.dims[place] if place < len(event.dims) else None
    if not isinstance(sizes, list) or not sizes:
        raise TraceLacks(path, f"no shapes ({event.name})")
    return [int(size) for size in sizes]
