"""The ops of a Mixture-of-Experts layer on a chunk whose rows go to other ranks in tiles.

Tiles are messages of their own, forward and backward; the rows that stay on the rank are in none. The tiles, and the
rows that stay, go through the experts like small chunks, while others are on their way (Comet, section 3).
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from megatron_lancet.model import moe_layer
from megatron_lancet.model.dispatcher.all_to_all import AllToAllDispatcher
from megatron_lancet.model.dispatcher.deduplicated import DeduplicatedDispatcher
from megatron_lancet.model.moe_layer import OverlappingMoE
from megatron_lancet.model.ops import ChunkState
from megatron_lancet.model.tiles.chunk import ChunkInParts
from megatron_lancet.model.tiles.weight_grads import GatheredWeightGrads
from megatron_lancet.runtime.all_to_all import AllToAll
from megatron_lancet.schedule.ops import Op, OpKind, Phase
from megatron_lancet.schedule.turns import Compute, Launch, LaunchCounts, Verb, Wait


def forward(moe: OverlappingMoE, verb: Verb, x: ChunkState) -> None:
    """Run a verb of a layer with experts."""
    if verb.of_all_rows in FORWARD:
        FORWARD[verb.of_all_rows](moe, x, Op(moe.number, x.chunk.index, Phase.FORWARD, verb.kind, verb.tile))
    else:
        moe_layer.FORWARD[verb](moe, x)


def launch_counts(moe: OverlappingMoE, x: ChunkState, op: Op) -> None:
    """Launch the exchange of token counts, which tells of distinct rows also how many each expert has of a tile."""
    if isinstance(moe.dispatcher, DeduplicatedDispatcher):
        x.routes = moe.dispatcher.launch_counts(op, x.routing_map_tE, x.routed, x.tiling)
        del x.routed
    else:
        moe_layer.launch_counts(moe, x)


def launch_dispatch(moe: OverlappingMoE, x: ChunkState, op: Op) -> None:
    """Send a tile to its experts; before the first one, cut the rows."""
    assert op.tile is not None
    if op.tile == 0:
        assert x.tiling is not None
        dispatcher = moe.dispatcher
        assert isinstance(dispatcher, AllToAllDispatcher | DeduplicatedDispatcher)
        pending: Any = x.routes  # made by this dispatcher
        routes = dispatcher.in_parts(pending, x.tiling, x.rows[1])
        gathered = GatheredWeightGrads(x.tiling.num_parts, lambda: routes.received_by_source, moe.expert_of)
        x.parts = ChunkInParts(routes, gathered, x.rows)
        del x.rows
    x.parts.launch(op.tile, AllToAll(moe.comm, op, x.parts.routes.splits(op.tile)))


def wait_for_rows(moe: OverlappingMoE, x: ChunkState, op: Op) -> None:
    """Receive a tile: other tokens' rows, or the outputs of the chunk's own."""
    assert op.tile is not None
    x.parts.wait(op.tile)


def own_experts(moe: OverlappingMoE, x: ChunkState, op: Op) -> None:
    """Run this rank's experts on rows that have stayed here, or on a half of them."""
    _run_part(moe, x, x.parts.part_of(op))


def experts(moe: OverlappingMoE, x: ChunkState, op: Op) -> None:
    """Run this rank's experts on a tile."""
    if op.tile == 0:
        moe_layer.count_received(moe, x)
    _run_part(moe, x, x.parts.part_of(op))


def _run_part(moe: OverlappingMoE, x: ChunkState, part: int) -> None:
    parts, last_expert_first = x.parts, moe.last_expert_first
    routes, sum_dtype = parts.routes.routes(part), parts.rows[part][1].dtype
    # The rows in the order of arrival are freed here: autograd needs the sorted ones only.
    parts.rows[part] = moe.dispatcher.collect(parts.rows[part], routes, last_expert_first)
    output = moe_layer.run_experts(moe, parts.rows[part], routes, partial(parts.weight_grads.in_part, part))
    parts.rows[part] = (moe.dispatcher.sort_by_peer(output, routes, sum_dtype, last_expert_first),)


def launch_combine(moe: OverlappingMoE, x: ChunkState, op: Op) -> None:
    """Send the experts' outputs of a tile back to the ranks of their tokens."""
    assert op.tile is not None
    assert x.tiling is not None
    is_last = op.tile == x.tiling.num_tiles - 1
    splits = x.parts.routes.known_splits(op.tile).reversed()
    # In the backward the last one is launched first.
    x.parts.launch(op.tile, AllToAll(moe.comm, op, splits, ends_backward_op=is_last))


def postprocess(moe: OverlappingMoE, x: ChunkState, op: Op) -> None:
    """Sum the outputs of each token's experts."""
    x.rows = (x.parts.joined(),)
    del x.parts, x.routes
    moe_layer.postprocess(moe, x)


FORWARD: Mapping[Verb, Callable[[OverlappingMoE, ChunkState, Op], None]] = {
    LaunchCounts(OpKind.COUNTS): launch_counts,
    Launch(OpKind.DISPATCH): launch_dispatch,
    Wait(OpKind.DISPATCH): wait_for_rows,
    Compute(OpKind.OWN_EXPERTS): own_experts,
    Compute(OpKind.EXPERTS): experts,
    Launch(OpKind.COMBINE): launch_combine,
    Wait(OpKind.COMBINE): wait_for_rows,
    Compute(OpKind.POSTPROCESS): postprocess,
}
