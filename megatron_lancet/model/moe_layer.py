"""The ops of a Mixture-of-Experts layer on one chunk, in the order of the data.

``schedule/turns.py`` says when each of them runs.

Legend of shapes: s positions, b samples, t = s * b tokens of the chunk, E experts, n rows sent (one per token and
chosen expert), r rows received, m rows of the local experts (m = r without expert tensor parallelism), H hidden size.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_capacity

from megatron_lancet.model.dispatcher.all_to_all import AllToAllDispatcher
from megatron_lancet.model.dispatcher.base import Dispatcher
from megatron_lancet.model.dispatcher.deduplicated import DeduplicatedDispatcher
from megatron_lancet.model.dispatcher.routes import DistinctRoutes, PendingRoutes, Routes
from megatron_lancet.model.ops import ChunkState
from megatron_lancet.model.recompute import NOTHING, Recompute, maybe_recomputed, outputs_dropped_in_stock
from megatron_lancet.model.te.precision import op_precision
from megatron_lancet.runtime.all_to_all import AllToAll
from megatron_lancet.runtime.comm import Comm
from megatron_lancet.runtime.placement import on_cuda
from megatron_lancet.runtime.transport.base import ReadyEvent
from megatron_lancet.schedule.ops import Op, OpKind, Phase
from megatron_lancet.schedule.plan import Dispatch
from megatron_lancet.schedule.turns import Compute, Launch, LaunchCounts, Verb, Wait


@dataclass(frozen=True)
class OverlappingMoE:
    """The experts of a layer that Megatron built, prepared for chunks.

    Attributes:
        number: number of its layer.
        stock: Megatron's module.
        dispatchers: move rows between tokens' ranks and experts' ranks.
        comm: all-to-alls of the model.
        recompute: which ops are recomputed in the backward pass.
    """

    number: int
    stock: MoELayer
    dispatchers: Mapping[Dispatch, Dispatcher]
    comm: Comm
    recompute: Recompute = NOTHING

    @property
    def dispatcher(self) -> Dispatcher:
        """The one of the present plan."""
        return self.dispatchers[self.comm.dispatch]

    def message_op(self, kind: OpKind, x: ChunkState) -> Op:
        """The message of a kind that a chunk sends in this layer."""
        return Op(self.number, x.chunk.index, Phase.FORWARD, kind)


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
    x.routes = moe.dispatcher.launch_counts(moe.message_op(OpKind.COUNTS, x), x.routing_map_tE, x.routed)
    del x.routed


def preprocess(moe: OverlappingMoE, x: ChunkState) -> None:
    """Make the rows to send, ordered by the rank that they go to."""
    if not hasattr(x, "routes"):  # no counts were launched: every expert gets as many rows as fit into its capacity
        assert isinstance(moe.dispatcher, AllToAllDispatcher), "rows of a padded capacity are all different"
        x.routes = moe.dispatcher.even_routes(_capacity(moe.stock, len(x.probs_tE)), x.probs_tE.device)
        del x.routed
    if moe.comm.trace is not None:
        op = moe.message_op(OpKind.EXPERTS, x)
        moe.comm.trace.routed(str(op), x.routing_map_tE, moe.stock.num_local_experts)
    x.rows, x.permutation = moe.dispatcher.permute(x.normed_sbH, x.probs_tE, x.routing_map_tE, _num_rows(moe, x))
    del x.normed_sbH, x.probs_tE, x.routing_map_tE


def launch_dispatch(moe: OverlappingMoE, x: ChunkState) -> None:
    """Send the rows to their experts, as soon as the counts have arrived, if any were sent."""
    splits = x.routes if isinstance(x.routes, PendingRoutes) else x.routes.splits
    x.launch(AllToAll(moe.comm, moe.message_op(OpKind.DISPATCH, x), splits))


def shared_experts(moe: OverlappingMoE, x: ChunkState) -> None:
    """Run the experts that see all tokens."""
    again = moe.recompute.shared_experts
    with x.norm.consumed():
        x.shared_sbH = maybe_recomputed(again, _run_shared_experts, moe.stock, x.shared_input_sbH)
    del x.shared_input_sbH


def wait_dispatch(moe: OverlappingMoE, x: ChunkState) -> None:
    """Receive other tokens' rows."""
    x.wait()


def experts(moe: OverlappingMoE, x: ChunkState) -> None:
    """Run this rank's experts on the rows received."""
    routes, sum_dtype = x.routes.wait(), x.rows[1].dtype
    # The rows in the order of arrival are freed here: autograd needs the sorted ones only.
    last_expert_first = getattr(moe.stock.experts, "last_expert_first", False)
    x.rows = moe.dispatcher.collect(x.rows, routes, last_expert_first)
    with outputs_dropped_in_stock(moe.recompute.drops_outputs):
        output = maybe_recomputed(moe.recompute.experts, _run_experts, moe, *x.rows, routes, last_expert_first)
    x.rows = (moe.dispatcher.sort_by_peer(output, routes, sum_dtype, last_expert_first),)


def launch_combine(moe: OverlappingMoE, x: ChunkState) -> None:
    """Send the experts' outputs back to the ranks of their tokens."""
    x.launch(AllToAll(moe.comm, moe.message_op(OpKind.COMBINE, x), x.routes.wait().splits.reversed()))
    del x.routes


def wait_combine(moe: OverlappingMoE, x: ChunkState) -> None:
    """Receive the outputs of the chunk's own rows."""
    x.wait()


def postprocess(moe: OverlappingMoE, x: ChunkState) -> None:
    """Sum the outputs of each token's experts."""
    (output_nH,) = x.rows
    x.output_sbH = moe.dispatcher.unpermute(output_nH, x.permutation)
    del x.rows, x.permutation
    if moe.stock.use_shared_expert:
        x.output_sbH = x.output_sbH + x.shared_sbH
        del x.shared_sbH


FORWARD: Mapping[Verb, Callable[[OverlappingMoE, ChunkState], None]] = {
    Compute(OpKind.ROUTE): route,
    LaunchCounts(OpKind.COUNTS): launch_counts,
    Compute(OpKind.PREPROCESS): preprocess,
    Launch(OpKind.DISPATCH): launch_dispatch,
    Compute(OpKind.SHARED_EXPERTS): shared_experts,
    Wait(OpKind.DISPATCH): wait_dispatch,
    Compute(OpKind.EXPERTS): experts,
    Launch(OpKind.COMBINE): launch_combine,
    Wait(OpKind.COMBINE): wait_combine,
    Compute(OpKind.POSTPROCESS): postprocess,
}


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


def _num_rows(moe: OverlappingMoE, x: ChunkState) -> int:
    """Number of rows that a chunk makes to send. With the plain dispatch the host knows it unless tokens are dropped.

    Then it waits for the chunk's own counts. The count of all rows would wait for all that the device has to do.
    Distinct rows are always counted. On CUDA the host does not wait for them here, because the device would run out of
    work in front of each message: it makes as many rows as there may be, and those that are left over stay here.
    """
    topk = moe.stock.config.moe_router_topk
    dispatcher = moe.dispatcher
    if isinstance(dispatcher, DeduplicatedDispatcher):
        if on_cuda(x.probs_tE):
            return dispatcher.most_rows(len(x.probs_tE), topk)
    elif moe.stock.config.moe_expert_capacity_factor is None:
        return len(x.probs_tE) * topk
    return x.routes.num_sent() if isinstance(x.routes, PendingRoutes) else sum(x.routes.splits.sent)


def _run_shared_experts(moe: MoELayer, normed_sbH: torch.Tensor) -> torch.Tensor:
    with op_precision(moe):
        return moe.shared_experts_compute(normed_sbH)


def _run_experts(
    moe: OverlappingMoE,
    tokens: torch.Tensor,
    probs: torch.Tensor,
    routes: Routes | DistinctRoutes,
    last_expert_first: bool,
) -> torch.Tensor:
    """Runs rows of the dispatcher through the local experts; [..., H], in their order."""

    def run(tokens_mH: torch.Tensor, probs_m: torch.Tensor) -> torch.Tensor:
        with op_precision(moe.stock):
            output_mH, bias = moe.stock.experts(tokens_mH, routes.rows_per_expert, probs_m)
        assert bias is None, "experts return their bias added to the output"
        return output_mH

    return moe.dispatcher.through_experts(run, tokens, probs, routes, last_expert_first)
