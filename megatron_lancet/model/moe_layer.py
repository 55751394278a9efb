"""The ops of a Mixture-of-Experts layer on one chunk, in the order of the data.

``schedule/turns.py`` says when each of them runs. Optional parts of a model replace some of them, see ``parts.py``.

Legend of shapes: s positions, b samples, t = s * b tokens of the chunk, E experts, n rows sent (one per token and
chosen expert), r rows received, m rows of the local experts (m = r without expert tensor parallelism), H hidden size.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_capacity

from megatron_lancet.model.dispatcher.base import Dispatcher
from megatron_lancet.model.dispatcher.routes import KnownRoutes
from megatron_lancet.model.ops import ChunkState
from megatron_lancet.model.overlapping_moe import ForwardOps, OverlappingMoE
from megatron_lancet.model.recompute import maybe_recomputed, outputs_dropped_in_stock
from megatron_lancet.model.te.precision import op_precision
from megatron_lancet.runtime.transport.base import ReadyEvent
from megatron_lancet.schedule.ops import OpKind
from megatron_lancet.schedule.turns import Compute, Launch, LaunchCounts, Wait


def route(moe: OverlappingMoE, x: ChunkState) -> None:
    """Choose the experts of each token."""
    router_input_sbH = x.normed_sbH
    if moe.stock.use_shared_expert:
        x.shared_input_sbH = x.normed_sbH
        if x.chunk.num_chunks == 1:
            x.normed_sbH, router_input_sbH, x.shared_input_sbH = _ForkInStocksOrder.apply(x.normed_sbH)
    with x.norm.consumed():
        x.probs_tE, x.routing_map_tE = moe.stock.router(router_input_sbH, chunk=x.chunk)
    x.routed = ReadyEvent(x.routing_map_tE)


def launch_counts(moe: OverlappingMoE, x: ChunkState) -> None:
    """Launch the exchange of token counts."""
    x.routes = moe.dispatcher.launch_counts(moe.op(OpKind.COUNTS, x), x.routing_map_tE, x.routed)
    del x.routed


def preprocess(moe: OverlappingMoE, x: ChunkState) -> None:
    """Make the rows to send, ordered by the rank that they go to."""
    dispatcher, config = moe.dispatcher, moe.stock.config
    if x.routes is None:  # no counts were launched: every expert gets as many rows as fit into its capacity
        x.routes = dispatcher.even_routes(_capacity(moe.stock, len(x.probs_tE)), x.probs_tE.device)
        del x.routed
    if moe.comm.trace is not None:
        op = moe.op(OpKind.EXPERTS, x)
        moe.comm.trace.routed(str(op), x.routing_map_tE, moe.stock.num_local_experts, moe.comm.nodes)
    moe.comm.stats.add("num_routed_tokens", len(x.probs_tE))
    drops = config.moe_expert_capacity_factor is not None or moe.stock.router.num_experts > config.num_moe_experts
    num_rows = dispatcher.num_rows(x.probs_tE, config.moe_router_topk, drops, x.routes)
    x.rows, x.permutation = dispatcher.permute(x.normed_sbH, x.probs_tE, x.routing_map_tE, num_rows)
    del x.normed_sbH, x.probs_tE, x.routing_map_tE


def launch_dispatch(moe: OverlappingMoE, x: ChunkState) -> None:
    """Send the rows to their experts as soon as the counts have arrived, if any were sent."""
    x.launch(moe.all_to_all(OpKind.DISPATCH, x, x.present_routes.to_launch()))


def shared_experts(moe: OverlappingMoE, x: ChunkState) -> None:
    """Run the experts that see all tokens."""
    again = moe.recompute.shared_experts
    with x.norm.consumed():
        x.shared_sbH = maybe_recomputed(again, _run_shared_experts, moe.stock, x.shared_input_sbH)
    x.shared_input_sbH = None


def wait_for_rows(moe: OverlappingMoE, x: ChunkState) -> None:
    """Receive the rows of the message in flight: other tokens' rows, or the outputs of the chunk's own."""
    x.wait()


def experts(moe: OverlappingMoE, x: ChunkState) -> None:
    """Run this rank's experts on the rows received."""
    count_received(moe, x)
    routes, sum_dtype = x.present_routes.wait(), x.rows[1].dtype
    # The rows in the order of arrival are freed here: autograd needs the sorted ones only.
    x.rows = moe.dispatcher.collect(x.rows, routes, moe.last_expert_first)
    output = run_experts(moe, x.rows, routes)
    x.rows = (moe.dispatcher.sort_by_peer(output, routes, sum_dtype, moe.last_expert_first),)


def launch_combine(moe: OverlappingMoE, x: ChunkState) -> None:
    """Send the experts' outputs back to the ranks of their tokens."""
    x.launch(moe.all_to_all(OpKind.COMBINE, x, x.present_routes.wait().splits.reversed()))
    x.routes = None


def postprocess(moe: OverlappingMoE, x: ChunkState) -> None:
    """Sum the outputs of each token's experts."""
    (output_nH,) = x.rows
    x.output_sbH = moe.dispatcher.unpermute(output_nH, x.permutation)
    del x.rows, x.permutation
    if x.shared_sbH is not None:
        x.output_sbH = x.output_sbH + x.shared_sbH
        x.shared_sbH = None


OPS: ForwardOps = {
    Compute(OpKind.ROUTE): route,
    LaunchCounts(OpKind.COUNTS): launch_counts,
    Compute(OpKind.PREPROCESS): preprocess,
    Launch(OpKind.DISPATCH): launch_dispatch,
    Compute(OpKind.SHARED_EXPERTS): shared_experts,
    Wait(OpKind.DISPATCH): wait_for_rows,
    Compute(OpKind.EXPERTS): experts,
    Launch(OpKind.COMBINE): launch_combine,
    Wait(OpKind.COMBINE): wait_for_rows,
    Compute(OpKind.POSTPROCESS): postprocess,
}


def count_received(moe: OverlappingMoE, x: ChunkState) -> None:
    """Wait for the counts, and add a chunk whose rows come in one message to the counters."""
    moe.comm.stats.raise_to("peak_expert_rows", count_chunk(moe, x))


def count_chunk(moe: OverlappingMoE, x: ChunkState) -> int:
    """Wait for the counts, and add them to the counters; returns the number of rows of this rank's experts."""
    routes = x.present_routes.wait()
    receive = moe.comm.settings.expert_rows
    if receive is not None and (received := x.present_routes.received()) is not None:
        receive(moe.number, received)
    num_rows = sum(routes.rows_per_expert.tolist())
    moe.comm.stats.add("num_chunks", 1)
    moe.comm.stats.add("num_expert_rows", num_rows)
    return num_rows


def run_experts(
    moe: OverlappingMoE,
    rows: tuple[torch.Tensor, ...],
    routes: KnownRoutes,
    in_part: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> torch.Tensor:
    """Run this rank's experts; [M, H].

    Args:
        rows: those that the dispatcher has collected for them.
        in_part: returns what linear layers run in, also when they run again.
    """
    with outputs_dropped_in_stock(moe.recompute.drops_outputs):
        return maybe_recomputed(
            moe.recompute.experts,
            run_rows_through_experts,
            moe,
            moe.dispatcher,
            *rows,
            routes,
            moe.last_expert_first,
            in_part,
        )


def run_rows_through_experts(
    moe: OverlappingMoE,
    dispatcher: Dispatcher,
    tokens: torch.Tensor,
    probs: torch.Tensor,
    routes: KnownRoutes,
    last_expert_first: bool,
    in_part: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> torch.Tensor:
    """Runs rows of the dispatcher through the local experts; [..., H], in their order."""

    def run(tokens_mH: torch.Tensor, probs_m: torch.Tensor) -> torch.Tensor:
        with in_part(), op_precision(moe.stock):
            output_mH, bias = moe.stock.experts(tokens_mH, routes.rows_per_expert, probs_m)
        assert bias is None, "experts return their bias added to the output"
        return output_mH

    return dispatcher.through_experts(run, tokens, probs, routes, last_expert_first)


class _ForkInStocksOrder(torch.autograd.Function):
    """The input of a layer's experts for the permutation, the router and the shared experts.

    Stock runs the shared experts first, we run them while the dispatch is in flight, and autograd adds gradients as
    they come. Adding them here keeps stock's order of sums.
    """

    @staticmethod
    def forward(ctx: Any, normed_sbH: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(normed_sbH.view_as(normed_sbH) for _ in range(3))

    @staticmethod
    def backward(ctx: Any, *grads_sbH: torch.Tensor | None) -> torch.Tensor | None:
        return functools.reduce(torch.add, [grad_sbH for grad_sbH in grads_sbH if grad_sbH is not None])


def _capacity(moe: MoELayer, num_tokens: int) -> int:
    """Rows of each expert from the tokens of this rank, where the router drops and pads."""
    config = moe.config
    num_chosen = num_tokens * config.moe_router_topk
    capacity: int = get_capacity(num_chosen, config.num_moe_experts, config.moe_expert_capacity_factor)
    return min(capacity, num_tokens)


def _run_shared_experts(moe: MoELayer, normed_sbH: torch.Tensor) -> torch.Tensor:
    with op_precision(moe):
        return moe.shared_experts_compute(normed_sbH)
