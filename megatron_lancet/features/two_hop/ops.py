"""The ops of a Mixture-of-Experts layer on a chunk whose rows go to nodes, and there to ranks."""

from collections.abc import Mapping

from megatron_lancet.features.two_hop.dispatcher import TwoHopDispatcher
from megatron_lancet.features.two_hop.routes import TwoHopRoutes
from megatron_lancet.model.dispatcher.base import Dispatcher, ExpertRanks
from megatron_lancet.model.moe_layer import wait_for_rows
from megatron_lancet.model.ops import ChunkState
from megatron_lancet.model.overlapping_moe import ForwardOps, OverlappingMoE
from megatron_lancet.model.parts import ModelPart
from megatron_lancet.schedule.ops import OpKind
from megatron_lancet.schedule.plan import Dispatch, Segment
from megatron_lancet.schedule.turns import Compute, Launch, Wait


def launch_node_dispatch(moe: OverlappingMoE, x: ChunkState) -> None:
    """Send the rows to the nodes of their experts."""
    x.launch(moe.all_to_all(OpKind.NODE_DISPATCH, x, x.present_routes.to_launch()))


def node_rows(moe: OverlappingMoE, x: ChunkState) -> None:
    """Make the rows for the ranks of this node from the rows that came to it."""
    x.rows, x.kept = _dispatcher(moe).pass_on(x.rows, _routes(x))


def launch_local_dispatch(moe: OverlappingMoE, x: ChunkState) -> None:
    """Send the rows to their experts inside the node."""
    x.launch(moe.all_to_all(OpKind.LOCAL_DISPATCH, x, _routes(x).local_splits))


def launch_local_combine(moe: OverlappingMoE, x: ChunkState) -> None:
    """Send the experts' outputs back to the ranks that had passed their rows on."""
    x.launch(moe.all_to_all(OpKind.LOCAL_COMBINE, x, _routes(x).local_splits.reversed()))


def node_sums(moe: OverlappingMoE, x: ChunkState) -> None:
    """Sum the outputs of each row that came to this node over its ranks."""
    (output,) = x.rows
    x.rows = (_dispatcher(moe).sum_of_node(output, x.kept),)
    del x.kept


def launch_node_combine(moe: OverlappingMoE, x: ChunkState) -> None:
    """Send the sums of this node back to the ranks of their tokens."""
    x.launch(moe.all_to_all(OpKind.NODE_COMBINE, x, _routes(x).splits.reversed()))
    x.routes = None


OPS: ForwardOps = {
    Launch(OpKind.NODE_DISPATCH): launch_node_dispatch,
    Wait(OpKind.NODE_DISPATCH): wait_for_rows,
    Compute(OpKind.NODE_ROWS): node_rows,
    Launch(OpKind.LOCAL_DISPATCH): launch_local_dispatch,
    Wait(OpKind.LOCAL_DISPATCH): wait_for_rows,
    Launch(OpKind.LOCAL_COMBINE): launch_local_combine,
    Wait(OpKind.LOCAL_COMBINE): wait_for_rows,
    Compute(OpKind.NODE_SUMS): node_sums,
    Launch(OpKind.NODE_COMBINE): launch_node_combine,
    Wait(OpKind.NODE_COMBINE): wait_for_rows,
}


def _dispatcher(moe: OverlappingMoE) -> TwoHopDispatcher:
    assert isinstance(moe.dispatcher, TwoHopDispatcher)
    return moe.dispatcher


def _routes(x: ChunkState) -> TwoHopRoutes:
    routes = x.present_routes.wait()
    assert isinstance(routes, TwoHopRoutes)
    return routes


class _TwoHop(ModelPart):
    def dispatchers(self, ranks: ExpertRanks) -> Mapping[Dispatch, Dispatcher]:
        """The dispatcher of two hops, where these have connections."""
        comm, num_experts, num_ranks, expert_tp_group, rank = ranks
        if comm.nodes is None:
            return {}
        return {
            Dispatch.TWO_HOP: TwoHopDispatcher(comm, num_experts, num_ranks, expert_tp_group, comm.nodes, rank),
        }

    def ops(self, segment: Segment, dispatch: Dispatch, ops: ForwardOps) -> ForwardOps:
        """The ops of both hops."""
        return OPS if dispatch is Dispatch.TWO_HOP else {}


TWO_HOP = _TwoHop()
