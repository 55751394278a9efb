"""The ops of a Mixture-of-Experts layer on one chunk, in the order of the data.

``schedule/turns.py`` says when each of them runs.

Legend of shapes: s positions, b samples, t = s * b tokens of the chunk, E experts, n rows sent (one per token and
chosen expert), r rows received, m rows of the local experts (m = r without expert tensor parallelism), H hidden size.
"""

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_capacity

from megatron_lancet.model.dispatcher.all_to_all import AllToAllDispatcher
from megatron_lancet.model.dispatcher.base import AnyRoutes, Dispatcher
from megatron_lancet.model.dispatcher.routes import PendingRoutes, Routes, TwoHopRoutes
from megatron_lancet.model.dispatcher.two_hop import TwoHopDispatcher
from megatron_lancet.model.in_rounds import ChunkInRounds
from megatron_lancet.model.ops import ChunkState
from megatron_lancet.model.recompute import NOTHING, Recompute, maybe_recomputed, outputs_dropped_in_stock
from megatron_lancet.model.te.precision import op_precision
from megatron_lancet.runtime.all_to_all import AllToAll
from megatron_lancet.runtime.comm import Comm
from megatron_lancet.runtime.comm_stats import SplitChunk
from megatron_lancet.runtime.placement import on_cuda
from megatron_lancet.runtime.transport.base import ReadyEvent
from megatron_lancet.schedule.dispatch import PLAIN, Dispatch
from megatron_lancet.schedule.ops import Op, OpKind, Phase
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
        assert self.comm.dispatch in self.dispatchers, "nothing was prepared for this dispatch"
        return self.dispatchers[self.comm.dispatch]

    @property
    def local_experts(self) -> Sequence[int]:
        """Numbers of the experts of this rank, in the order of their places."""
        places = getattr(self.stock.router, "places", None)
        if places is not None:
            return places.local_experts
        num_local, rank = self.stock.num_local_experts, self.stock.token_dispatcher.ep_group.rank()
        return range(num_local * rank, num_local * (rank + 1))

    @property
    def last_expert_first(self) -> bool:
        """Whether the next forward pass of the experts expects the last one's rows first."""
        return getattr(self.stock.experts, "last_expert_first", False)

    @cached_property
    def expert_of(self) -> Mapping[Hashable, int]:
        """The local expert of each module of the experts that run one after the other."""
        experts = getattr(self.stock.experts, "local_experts", ())
        return {module: place for place, expert in enumerate(experts) for module in expert.modules()}

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
        moe.comm.trace.routed(str(op), x.routing_map_tE, moe.stock.num_local_experts, moe.comm.nodes)
    moe.comm.stats.add("num_routed_tokens", len(x.probs_tE))
    x.rows, x.permutation = moe.dispatcher.permute(x.normed_sbH, x.probs_tE, x.routing_map_tE, _num_rows(moe, x))
    del x.normed_sbH, x.probs_tE, x.routing_map_tE


def _launch_first_dispatch(moe: OverlappingMoE, x: ChunkState, kind: OpKind) -> None:
    """Send the rows to their experts, or nodes, as soon as the counts have arrived, if any were sent."""
    splits = x.routes if isinstance(x.routes, PendingRoutes) else x.routes.splits
    if moe.comm.max_expert_rows is not None:
        x.sent = tuple(rows.detach() for rows in x.rows)
    x.launch(AllToAll(moe.comm, moe.message_op(kind, x), splits))


def launch_dispatch(moe: OverlappingMoE, x: ChunkState) -> None:
    """Send the rows to their experts."""
    _launch_first_dispatch(moe, x, OpKind.DISPATCH)


def launch_node_dispatch(moe: OverlappingMoE, x: ChunkState) -> None:
    """Send the rows to the nodes of their experts."""
    _launch_first_dispatch(moe, x, OpKind.NODE_DISPATCH)


def shared_experts(moe: OverlappingMoE, x: ChunkState) -> None:
    """Run the experts that see all tokens."""
    again = moe.recompute.shared_experts
    with x.norm.consumed():
        x.shared_sbH = maybe_recomputed(again, _run_shared_experts, moe.stock, x.shared_input_sbH)
    del x.shared_input_sbH


def wait_for_rows(moe: OverlappingMoE, x: ChunkState) -> None:
    """Receive the rows of the message in flight: other tokens' rows, or the outputs of the chunk's own."""
    x.wait()


def wait_for_first_dispatch(moe: OverlappingMoE, x: ChunkState) -> None:
    """Receive other tokens' rows, or, of a chunk with too many rows for a rank, the outputs of its own, in rounds."""
    if moe.comm.max_expert_rows is None:
        x.wait()
        return
    sent = x.sent
    del x.sent
    if x.message.wait_for_launch():
        x.rows = x.message.received(x.ticket)
    else:
        x.rows, x.is_back = (_in_rounds(moe, x).run(x.message, x.ticket, sent),), True
    del x.message, x.ticket


def _in_rounds(moe: OverlappingMoE, x: ChunkState) -> ChunkInRounds:
    """The rounds of a chunk that is over the limit of rows."""
    assert isinstance(x.routes, PendingRoutes)
    over, routes = x.routes.over_limit(), x.routes.wait()
    assert over is not None
    plain = moe.dispatchers[PLAIN]
    assert isinstance(plain, AllToAllDispatcher)
    rows_per_expert, rounds = plain.rounds(over)
    dispatch, combine = (moe.message_op(kind, x) for kind in (OpKind.DISPATCH, OpKind.COMBINE))
    moe.comm.stats.add("num_split_chunks", 1)
    moe.comm.stats.raise_to("most_rounds", over.num_rounds)
    if moe.comm.first_split is None:
        most = max(over.rows)
        moe.comm.first_split = SplitChunk(dispatch, over.num_rounds, most, over.rows.index(most))
    return ChunkInRounds(
        moe.comm,
        dispatch,
        combine,
        rounds,
        partial(moe.dispatcher.of_each_expert, sent=routes.splits.sent, rows_per_expert=rows_per_expert),
        partial(_through_experts, moe, plain),
        [parameter for parameter in moe.stock.experts.parameters() if parameter.requires_grad],
    )


def node_rows(moe: OverlappingMoE, x: ChunkState) -> None:
    """Make the rows for the ranks of this node from those that came to it."""
    if x.is_back:
        return
    assert isinstance(moe.dispatcher, TwoHopDispatcher)
    x.rows, x.passed = moe.dispatcher.pass_on(x.rows, _both_hops(x))


def launch_local_dispatch(moe: OverlappingMoE, x: ChunkState) -> None:
    """Send the rows to their experts inside the node."""
    splits = None if x.is_back else _both_hops(x).local_splits
    x.launch(AllToAll(moe.comm, moe.message_op(OpKind.LOCAL_DISPATCH, x), splits))


def count_received(moe: OverlappingMoE, x: ChunkState) -> None:
    """Wait for the counts, and add them to the counters."""
    routes = x.routes.wait()
    if moe.comm.expert_rows is not None and isinstance(x.routes, PendingRoutes):
        moe.comm.expert_rows(moe.number, x.routes.received())
    _count_rows(moe.comm, routes, x.is_back)


def experts(moe: OverlappingMoE, x: ChunkState) -> None:
    """Run this rank's experts on the rows received."""
    count_received(moe, x)
    if x.is_back:
        return
    routes, sum_dtype = x.routes.wait(), x.rows[1].dtype
    # The rows in the order of arrival are freed here: autograd needs the sorted ones only.
    x.rows = moe.dispatcher.collect(x.rows, routes, moe.last_expert_first)
    output = run_experts(moe, x.rows, routes)
    x.rows = (moe.dispatcher.sort_by_peer(output, routes, sum_dtype, moe.last_expert_first),)


def run_experts(
    moe: OverlappingMoE,
    rows: tuple[torch.Tensor, ...],
    routes: AnyRoutes,
    in_part: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> torch.Tensor:
    """Run this rank's experts; [M, H].

    Args:
        rows: those that the dispatcher has collected for them.
        in_part: returns what linear layers run in, also when they run again.
    """
    with outputs_dropped_in_stock(moe.recompute.drops_outputs):
        return maybe_recomputed(
            moe.recompute.experts, _run_experts, moe, moe.dispatcher, *rows, routes, moe.last_expert_first, in_part
        )


def launch_local_combine(moe: OverlappingMoE, x: ChunkState) -> None:
    """Send the experts' outputs back to the ranks that had passed their rows on."""
    splits = None if x.is_back else _both_hops(x).local_splits.reversed()
    x.launch(AllToAll(moe.comm, moe.message_op(OpKind.LOCAL_COMBINE, x), splits))


def node_sums(moe: OverlappingMoE, x: ChunkState) -> None:
    """Sum what the ranks of this node have made of each row that came to it."""
    if x.is_back:
        return
    assert isinstance(moe.dispatcher, TwoHopDispatcher)
    (output,) = x.rows
    x.rows = (moe.dispatcher.sum_of_node(output, x.passed),)
    del x.passed


def _launch_last_combine(moe: OverlappingMoE, x: ChunkState, kind: OpKind) -> None:
    """Send the experts' outputs back to the ranks of their tokens."""
    splits = None if x.is_back else x.routes.wait().splits.reversed()
    x.launch(AllToAll(moe.comm, moe.message_op(kind, x), splits))
    del x.routes


def launch_combine(moe: OverlappingMoE, x: ChunkState) -> None:
    """Send the experts' outputs back to the ranks of their tokens."""
    _launch_last_combine(moe, x, OpKind.COMBINE)


def launch_node_combine(moe: OverlappingMoE, x: ChunkState) -> None:
    """Send the sums of this node back to the ranks of their tokens."""
    _launch_last_combine(moe, x, OpKind.NODE_COMBINE)


def postprocess(moe: OverlappingMoE, x: ChunkState) -> None:
    """Sum the outputs of each token's experts."""
    (output_nH,) = x.rows
    x.output_sbH = moe.dispatcher.unpermute(output_nH, x.permutation)
    del x.rows, x.permutation
    x.is_back = False
    if moe.stock.use_shared_expert:
        x.output_sbH = x.output_sbH + x.shared_sbH
        del x.shared_sbH


FORWARD: Mapping[Verb, Callable[[OverlappingMoE, ChunkState], None]] = {
    Compute(OpKind.ROUTE): route,
    LaunchCounts(OpKind.COUNTS): launch_counts,
    Compute(OpKind.PREPROCESS): preprocess,
    Launch(OpKind.DISPATCH): launch_dispatch,
    Launch(OpKind.NODE_DISPATCH): launch_node_dispatch,
    Compute(OpKind.SHARED_EXPERTS): shared_experts,
    Wait(OpKind.NODE_DISPATCH): wait_for_first_dispatch,
    Compute(OpKind.NODE_ROWS): node_rows,
    Launch(OpKind.LOCAL_DISPATCH): launch_local_dispatch,
    Wait(OpKind.LOCAL_DISPATCH): wait_for_rows,
    Wait(OpKind.DISPATCH): wait_for_first_dispatch,
    Compute(OpKind.EXPERTS): experts,
    Launch(OpKind.COMBINE): launch_combine,
    Wait(OpKind.COMBINE): wait_for_rows,
    Launch(OpKind.LOCAL_COMBINE): launch_local_combine,
    Wait(OpKind.LOCAL_COMBINE): wait_for_rows,
    Compute(OpKind.NODE_SUMS): node_sums,
    Launch(OpKind.NODE_COMBINE): launch_node_combine,
    Wait(OpKind.NODE_COMBINE): wait_for_rows,
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


def _count_rows(comm: Comm, routes: AnyRoutes, is_split: bool) -> None:
    num_rows = int(routes.rows_per_expert.sum())
    comm.stats.add("num_chunks", 1)
    comm.stats.add("num_expert_rows", num_rows)
    if not is_split:
        comm.stats.raise_to("peak_expert_rows", num_rows)


def _both_hops(x: ChunkState) -> TwoHopRoutes:
    routes = x.routes.wait()
    assert isinstance(routes, TwoHopRoutes)
    return routes


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
    if not isinstance(dispatcher, AllToAllDispatcher):
        if on_cuda(x.probs_tE):
            return dispatcher.most_rows(len(x.probs_tE), topk)
    elif moe.stock.config.moe_expert_capacity_factor is None:
        return len(x.probs_tE) * topk
    return x.routes.num_sent() if isinstance(x.routes, PendingRoutes) else sum(x.routes.splits.sent)


def _run_shared_experts(moe: MoELayer, normed_sbH: torch.Tensor) -> torch.Tensor:
    with op_precision(moe):
        return moe.shared_experts_compute(normed_sbH)


def _through_experts(
    moe: OverlappingMoE, dispatcher: Dispatcher, received: tuple[torch.Tensor, ...], routes: Routes
) -> torch.Tensor:
    """Runs this rank's experts on the rows of a round: outputs in the order in which the rows came, [r, H]."""
    moe.comm.stats.raise_to("peak_expert_rows", sum(routes.rows_by_holder))
    sum_dtype = received[1].dtype
    last_expert_first = moe.last_expert_first
    tokens, probs = dispatcher.collect(received, routes, last_expert_first)
    with outputs_dropped_in_stock(moe.recompute.drops_outputs):
        output = _run_experts(moe, dispatcher, tokens, probs, routes, last_expert_first)
    return dispatcher.sort_by_peer(output, routes, sum_dtype, last_expert_first)


def _run_experts(
    moe: OverlappingMoE,
    dispatcher: Dispatcher,
    tokens: torch.Tensor,
    probs: torch.Tensor,
    routes: AnyRoutes,
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
