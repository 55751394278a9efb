"""Sizes of the model and the layout, from the shapes and the process groups of a trace."""

from math import prod

from megatron_lancet.planning.from_trace.events import Event, RankEvents
from megatron_lancet.planning.from_trace.forward import TOPK
from megatron_lancet.planning.from_trace.lacks import TraceLacks
from megatron_lancet.planning.from_trace.passes import EMBEDDING
from megatron_lancet.planning.from_trace.step import TracedStep, expert_group
from megatron_lancet.planning.profile import ModelFacts, packed_row_bytes
from megatron_lancet.schedule.ops import FIRST_DISPATCHES, Op, OpKind

_COUNT_BYTES = 8
_UNREAD_AXES = {
    "PIPELINE_MODEL_PARALLEL": "--pipeline-model-parallel-size",
    "TENSOR_MODEL_PARALLEL": "--tensor-model-parallel-size",
    "CONTEXT_PARALLEL": "--context-parallel-size",
    "EXPERT_TENSOR_PARALLEL": "--expert-tensor-parallel-size",
}


def check_layout(rank: RankEvents) -> None:
    """
    Raises:
        TraceLacks: the run had an axis whose messages would count as compute.
    """
    for group, flag in _UNREAD_AXES.items():
        if (size := rank.group_size(group)) > 1:
            raise TraceLacks(
                rank.path,
                f"{size} ranks in a group {group}, whose messages are not told from compute",
                f"Record with {flag} 1, or install the package and profile with tools/profile_model.py",
            )


def model_facts(rank: RankEvents, step: TracedStep) -> ModelFacts:
    """The facts of the run that a rank recorded.

    Raises:
        TraceLacks: shapes are not there, or the run dropped or padded tokens.
    """
    forward, batch = step.forwards[0], step.batches[0]
    calls = forward.calls[min(forward.calls)]
    embedding = next(op for op in batch.forward if op.name == EMBEDDING)
    until_us = calls.dispatches[0].launch.start_us
    choices = [op for op in batch.forward if op.name == TOPK and calls.router.start_us <= op.start_us < until_us]
    if not choices:
        raise TraceLacks(rank.path, f"no {TOPK} behind a router", "Record without --moe-router-fusion")
    tokens, num_experts, topk = _choice(rank.path, choices[-1])
    samples = _sizes(rank.path, embedding, 1)[0]
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
    kinds = tuple(forward.layer_kinds)
    hidden = prod(_sizes(rank.path, calls.dispatches[0].launch, 1)[1:])
    return ModelFacts(
        name=f"from a trace: layers={len(kinds)} hidden={hidden} experts={num_experts} top={topk}",
        layer_kinds=kinds,
        stage_of_layer=(0,) * len(kinds),
        micro_batch_size=samples,
        seq_length=tokens // samples,
        num_micro_batches=len(step.batches),
        topk=topk,
        num_experts=num_experts,
        ep_size=len(expert_group(rank)),
        world_size=rank.world_size,
        row_bytes=dispatched,
        grad_row_bytes=dispatched,
        combine_row_bytes=packed_row_bytes(hidden_bytes),
        combine_grad_row_bytes=packed_row_bytes(hidden_bytes),
        counts_bytes=num_experts * _COUNT_BYTES,
        has_shared_experts=any(Op.parse(name).kind == OpKind.SHARED_EXPERTS for name in step.parts if Op.find(name)),
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
