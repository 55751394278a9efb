"""The ops of a chunk whose rows have a bound on each rank; see ``in_rounds.py``.

A chunk over the bound has its output already when its dispatch has been waited for. The block lets it pass through the
instructions behind it; see :meth:`~megatron_lancet.model.ops.ChunkState.passes_through`.
"""

from collections.abc import Callable
from functools import partial

import torch

from megatron_lancet.features.row_bound.in_rounds import ChunkInRounds
from megatron_lancet.features.row_bound.limit import RowLimit
from megatron_lancet.features.row_bound.rounds import rounds_of
from megatron_lancet.model.dispatcher.routes import PendingRoutes, Routes
from megatron_lancet.model.moe_layer import count_chunk, run_rows_through_experts
from megatron_lancet.model.ops import ChunkState
from megatron_lancet.model.overlapping_moe import ForwardOp, ForwardOps, OverlappingMoE
from megatron_lancet.model.parts import ModelPart
from megatron_lancet.model.recompute import outputs_dropped_in_stock
from megatron_lancet.runtime.comm_stats import SplitChunk
from megatron_lancet.schedule.dispatch import PLAIN, Dispatch
from megatron_lancet.schedule.ops import FIRST_DISPATCHES, OpKind
from megatron_lancet.schedule.plan import Segment
from megatron_lancet.schedule.turns import Compute, Launch, LaunchCounts, Verb


def launch_counts(unbounded: ForwardOp, moe: OverlappingMoE, x: ChunkState) -> None:
    """Launch the exchange of token counts; with a bound each rank gets the counts of all."""
    max_rows = moe.comm.settings.max_expert_rows
    if max_rows is None:
        unbounded(moe, x)
        return
    num_experts = x.routing_map_tE.size(1)
    limit = RowLimit(max_rows, num_experts, num_experts // moe.stock.num_local_experts)
    x.routes = moe.dispatcher.launch_counts(moe.op(OpKind.COUNTS, x), x.routing_map_tE, x.routed, limit)
    del x.routed


def launch_dispatch(unbounded: ForwardOp, moe: OverlappingMoE, x: ChunkState) -> None:
    """Send the rows to their experts, or nodes, and keep them until the counts have arrived."""
    if moe.comm.settings.max_expert_rows is not None:
        x.kept = tuple(rows.detach() for rows in x.rows)
    unbounded(moe, x)


def wait_for_dispatch(unbounded: ForwardOp, moe: OverlappingMoE, x: ChunkState) -> None:
    """Receive other tokens' rows, or, of a chunk with too many rows for a rank, the outputs of its own, in rounds."""
    if moe.comm.settings.max_expert_rows is None:
        unbounded(moe, x)
        return
    sent = x.kept
    del x.kept
    if x.message.wait_for_launch():
        x.rows = x.message.received(x.ticket)
    else:
        no_rows = _without_rows(moe, *sent)
        x.rows, x.has_output = (_in_rounds(moe, x).run(x.message, x.ticket, sent, no_rows),), True
        count_chunk(moe, x)
    del x.message, x.ticket


def postprocess(unbounded: ForwardOp, moe: OverlappingMoE, x: ChunkState) -> None:
    """Sum the outputs of each token's experts."""
    unbounded(moe, x)
    x.routes, x.has_output = None, False


def _in_rounds(moe: OverlappingMoE, x: ChunkState) -> ChunkInRounds:
    """The rounds of a chunk that is over the bound."""
    assert isinstance(x.routes, PendingRoutes)
    assert isinstance(x.routes.limit, RowLimit)
    over, routes, own_rank = x.routes.limit.over, x.routes.wait(), moe.comm.own_rank
    assert over is not None
    plain = moe.dispatchers[PLAIN]
    num_ranks = x.routes.limit.num_ranks
    rounds = rounds_of(over.counts, num_ranks, over.num_rounds, own_rank, plain.tp_rank, over.like)
    rows_per_expert = over.counts[own_rank * plain.tp_size + plain.tp_rank]
    dispatch, combine = (moe.op(kind, x) for kind in (OpKind.DISPATCH, OpKind.COMBINE))
    moe.comm.stats.add("num_split_chunks", 1)
    moe.comm.stats.raise_to("num_split_steps", 1)
    moe.comm.stats.raise_to("most_rounds", over.num_rounds)
    if moe.comm.stats.first_split is None:
        most = max(over.rows)
        moe.comm.stats.first_split = SplitChunk(dispatch, over.num_rounds, most, over.rows.index(most))
    return ChunkInRounds(
        moe.comm,
        dispatch,
        combine,
        rounds,
        partial(moe.dispatcher.expand, sent=routes.splits.sent, rows_per_expert=rows_per_expert),
        partial(_through_experts, moe),
        [parameter for parameter in moe.stock.experts.parameters() if parameter.requires_grad],
    )


def _without_rows(moe: OverlappingMoE, tokens: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    """Runs this rank's experts on no rows, [0, H], for the order in which autograd visits their parameters."""
    dispatcher, last_expert_first = moe.dispatchers[PLAIN], moe.last_expert_first
    none = tokens[:0], probs.new_empty(0), dispatcher.even_routes(0, tokens.device)
    with outputs_dropped_in_stock(moe.recompute.drops_outputs):
        return run_rows_through_experts(moe, dispatcher, *none, last_expert_first)


def _through_experts(moe: OverlappingMoE, received: tuple[torch.Tensor, ...], routes: Routes) -> torch.Tensor:
    """Runs this rank's experts on the rows of a round: outputs in the order in which the rows came, [r, H]."""
    moe.comm.stats.raise_to("peak_expert_rows", sum(routes.rows_by_expert_tp_rank))
    dispatcher, sum_dtype = moe.dispatchers[PLAIN], received[1].dtype
    last_expert_first = moe.last_expert_first
    tokens, probs = dispatcher.collect(received, routes, last_expert_first)
    with outputs_dropped_in_stock(moe.recompute.drops_outputs):
        output = run_rows_through_experts(moe, dispatcher, tokens, probs, routes, last_expert_first)
    return dispatcher.sort_by_peer(output, routes, sum_dtype, last_expert_first)


type _Wrapper = Callable[[ForwardOp, OverlappingMoE, ChunkState], None]


class _RowBound(ModelPart):
    def ops(self, segment: Segment, dispatch: Dispatch, ops: ForwardOps) -> ForwardOps:
        """The ops that differ while there is a bound, which a run may set or drop between steps."""
        if segment.tiles:
            return {}
        wrappers: dict[Verb, _Wrapper] = {
            LaunchCounts(OpKind.COUNTS): launch_counts,
            Compute(OpKind.POSTPROCESS): postprocess,
        }
        for verb in ops:
            if verb.kind in FIRST_DISPATCHES:
                wrappers[verb] = launch_dispatch if isinstance(verb, Launch) else wait_for_dispatch
        return {verb: partial(wrapper, ops[verb]) for verb, wrapper in wrappers.items()}


ROW_BOUND = _RowBound()
