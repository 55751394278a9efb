"""One chunk's way through a Mixture-of-Experts layer, top to bottom; stops wherever its rows are on the wire."""

from collections.abc import Generator
from dataclasses import dataclass

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer

from megatron_lancet.model.chunking import Chunk
from megatron_lancet.model.dispatcher.all_to_all import AllToAllDispatcher, Routes
from megatron_lancet.model.recompute import NOTHING, Recompute, maybe_recomputed
from megatron_lancet.runtime.all_to_all import AllToAll
from megatron_lancet.runtime.comm import Comm
from megatron_lancet.runtime.trace import enter, leave
from megatron_lancet.schedule.ops import Op, OpKind, Phase

Steps = Generator[Op, None, torch.Tensor]
"""Yields each op that is in flight, so that others can run; returns hidden states."""


@dataclass(frozen=True)
class OverlappingMoE:
    """The experts of a layer that Megatron built, prepared for chunks.

    Attributes:
        stock: Megatron's module.
        dispatcher: moves rows between tokens' ranks and experts' ranks.
        comm: all-to-alls of the model.
        recompute: which segments are recomputed in the backward pass.
    """

    stock: MoELayer
    dispatcher: AllToAllDispatcher
    comm: Comm
    recompute: Recompute = NOTHING


def moe_steps(moe: OverlappingMoE, hidden: torch.Tensor, chunk: Chunk) -> Steps:
    """Route, dispatch, experts, combine.

    Args:
        hidden: [s, b, H], normed input of the layer.

    Returns:
        [s, b, H].
    """
    trace, number = moe.comm.trace, moe.stock.layer_number
    hidden = enter(trace, hidden, number, chunk.index, OpKind.ROUTE)
    probs, routing_map = moe.stock.router(hidden, chunk=chunk)
    leave(trace, number, chunk.index, OpKind.ROUTE)
    return (yield from routed_steps(moe, hidden, probs, routing_map, chunk))


def routed_steps(
    moe: OverlappingMoE, hidden: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor, chunk: Chunk
) -> Steps:
    """Dispatch, experts, combine.

    Args:
        hidden: [s, b, H], normed input of the layer.
        probs: [t, E].
        routing_map: [t, E] bool.

    Returns:
        [s, b, H].
    """

    def op(kind: OpKind) -> Op:
        return Op(moe.stock.layer_number, chunk.index, Phase.FORWARD, kind)

    dispatcher, comm, trace = moe.dispatcher, moe.comm, moe.comm.trace
    place = moe.stock.layer_number, chunk.index
    probs = enter(trace, probs, *place, OpKind.PREPROCESS)
    counts = dispatcher.launch_counts(op(OpKind.COUNTS), routing_map)
    rows = dispatcher.permute(hidden, probs, routing_map, num_rows(moe.stock, routing_map))
    dispatch = AllToAll(comm, op(OpKind.DISPATCH), counts)
    ticket = dispatch.launch(rows.tokens, rows.probs)
    leave(trace, *place, OpKind.PREPROCESS)
    shared_output = _shared_output(moe, hidden, chunk)
    yield dispatch.op
    tokens, token_probs = dispatch.wait(ticket)
    routes = counts.wait()
    if trace is not None:
        trace.received(str(op(OpKind.EXPERTS)), tokens.size(0))

    output = maybe_recomputed(moe.recompute.experts, _run_experts, moe, tokens, token_probs, routes, probs.dtype)

    combine = AllToAll(comm, op(OpKind.COMBINE), routes.splits.reversed())
    ticket = combine.launch(output)
    leave(trace, *place, OpKind.EXPERTS)
    yield combine.op
    (output,) = combine.wait(ticket)

    output = dispatcher.unpermute(output, rows)
    if shared_output is not None:
        output = output + shared_output
    leave(trace, *place, OpKind.POSTPROCESS)
    return output


def _shared_output(moe: OverlappingMoE, hidden: torch.Tensor, chunk: Chunk) -> torch.Tensor | None:
    """What the experts that see all tokens make of them, [s, b, H]; None without such experts."""
    if not moe.stock.use_shared_expert:
        return None
    place = moe.comm.trace, moe.stock.layer_number, chunk.index
    hidden = enter(place[0], hidden, *place[1:], OpKind.SHARED_EXPERTS)
    output = maybe_recomputed(moe.recompute.shared_experts, moe.stock.shared_experts_compute, hidden)
    leave(*place, OpKind.SHARED_EXPERTS)
    return output


def _run_experts(
    moe: OverlappingMoE, tokens: torch.Tensor, token_probs: torch.Tensor, routes: Routes, sum_dtype: torch.dtype
) -> torch.Tensor:
    """Received rows [r, H] through the local experts, in the order in which they came."""
    tokens, token_probs = moe.dispatcher.sort_by_expert(tokens, token_probs, routes)
    output, bias = moe.stock.experts(tokens, routes.rows_per_expert, token_probs)
    assert bias is None, "experts return their bias added to the output"
    return moe.dispatcher.sort_by_peer(output, routes, sum_dtype)


def num_rows(moe: MoELayer, routing_map: torch.Tensor) -> int:
    """Rows that a chunk sends: known without looking where no token is dropped and none is padded."""
    if moe.config.moe_expert_capacity_factor is None:
        return routing_map.size(0) * moe.config.moe_router_topk
    return int(routing_map.sum())
