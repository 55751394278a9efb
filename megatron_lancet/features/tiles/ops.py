"""The ops of a Mixture-of-Experts layer on a chunk whose rows go to other ranks in tiles.

Tiles are messages of their own, forward and backward. The rows that stay on the rank are in none, or each tile has a
part of them. Tiles and the rows that stay go through the experts like small chunks, while others are on their way
(Comet, section 3).
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from megatron_lancet.errors import UsageError
from megatron_lancet.features.tiles.chunk import ChunkInParts
from megatron_lancet.features.tiles.parts import Tiling, count_parts, parted_routes
from megatron_lancet.features.tiles.support import model_blocker
from megatron_lancet.features.tiles.weight_grads import GatheredWeightGrads
from megatron_lancet.model import moe_layer
from megatron_lancet.model.ops import ChunkState
from megatron_lancet.model.overlapping_moe import ForwardOps, OverlappingMoE
from megatron_lancet.model.parts import ModelPart
from megatron_lancet.runtime.all_to_all import AllToAll
from megatron_lancet.schedule.dispatch import Dispatch
from megatron_lancet.schedule.ops import Op, OpKind
from megatron_lancet.schedule.plan import Plan, Segment
from megatron_lancet.schedule.turns import Compute, Launch, LaunchCounts, Verb, Wait


def launch_counts(moe: OverlappingMoE, x: ChunkState, tiling: Tiling, op: Op) -> None:
    """Launch the exchange of token counts, which for distinct rows also has the rows of each expert in each tile."""
    if moe.dispatcher.has_plain_rows:
        moe_layer.launch_counts(moe, x)
        return
    dispatcher: Any = moe.dispatcher
    in_parts = partial(count_parts, tiling=tiling, own_rank=moe.comm.own_rank)
    x.routes = dispatcher.launch_counts(op, x.routing_map_tE, x.routed, in_parts=in_parts)
    del x.routed


def launch_dispatch(moe: OverlappingMoE, x: ChunkState, tiling: Tiling, op: Op) -> None:
    """Send a tile to its experts; before the first one, cut the rows."""
    assert op.tile is not None
    if op.tile == 0:
        routes = parted_routes(moe.dispatcher, x.present_routes, tiling, moe.comm.own_rank, x.rows[1])
        num_parts, store = tiling.num_parts, moe.comm.store
        gathered = GatheredWeightGrads(num_parts, lambda: routes.received_by_source, moe.expert_of, store)
        x.kept = ChunkInParts(routes, gathered, x.rows)
        del x.rows
    parts = _parts(x)
    parts.launch(op.tile, AllToAll(moe.comm, op, parts.routes.splits(op.tile)))


def wait_for_rows(moe: OverlappingMoE, x: ChunkState, tiling: Tiling, op: Op) -> None:
    """Receive a tile: other tokens' rows, or the outputs of the chunk's own."""
    assert op.tile is not None
    _parts(x).wait(op.tile)


def own_experts(moe: OverlappingMoE, x: ChunkState, tiling: Tiling, op: Op) -> None:
    """Run this rank's experts on rows that have stayed here, or on a half of them."""
    _run_part(moe, x, op)


def experts(moe: OverlappingMoE, x: ChunkState, tiling: Tiling, op: Op) -> None:
    """Run this rank's experts on a tile."""
    if op.tile == 0:
        moe_layer.count_received(moe, x)
    _run_part(moe, x, op)


def _run_part(moe: OverlappingMoE, x: ChunkState, op: Op) -> None:
    parts, last_expert_first = _parts(x), moe.last_expert_first
    part = parts.part_of(op)
    if moe.comm.trace is not None:
        parts.trace(moe.comm.trace, op)
    routes, sum_dtype = parts.routes.routes(part), parts.rows[part][1].dtype
    # The rows in the order of arrival are freed here: autograd needs the sorted ones only.
    parts.rows[part] = moe.dispatcher.collect(parts.rows[part], routes, last_expert_first)
    output = moe_layer.run_experts(moe, parts.rows[part], routes, partial(parts.weight_grads.in_part, part))
    parts.rows[part] = (moe.dispatcher.sort_by_peer(output, routes, sum_dtype, last_expert_first),)


def launch_combine(moe: OverlappingMoE, x: ChunkState, tiling: Tiling, op: Op) -> None:
    """Send the experts' outputs of a tile back to the ranks of their tokens."""
    assert op.tile is not None
    parts, is_last = _parts(x), op.tile == tiling.num_tiles - 1
    splits = parts.routes.known_splits(op.tile).reversed()
    # In the backward the last one is launched first.
    parts.launch(op.tile, AllToAll(moe.comm, op, splits, ends_backward_op=is_last))


def postprocess(moe: OverlappingMoE, x: ChunkState, tiling: Tiling, op: Op) -> None:
    """Sum the outputs of each token's experts."""
    x.rows = (_parts(x).joined(),)
    del x.kept
    x.routes = None
    moe_layer.postprocess(moe, x)


def _parts(x: ChunkState) -> ChunkInParts:
    assert isinstance(x.kept, ChunkInParts)
    return x.kept


OPS: Mapping[Verb, Callable[[OverlappingMoE, ChunkState, Tiling, Op], None]] = {
    LaunchCounts(OpKind.COUNTS): launch_counts,
    Launch(OpKind.DISPATCH): launch_dispatch,
    Wait(OpKind.DISPATCH): wait_for_rows,
    Compute(OpKind.OWN_EXPERTS): own_experts,
    Compute(OpKind.EXPERTS): experts,
    Launch(OpKind.COMBINE): launch_combine,
    Wait(OpKind.COMBINE): wait_for_rows,
    Compute(OpKind.POSTPROCESS): postprocess,
}
"""By verb of all rows; see :meth:`_Tiles.ops` for the verbs of a tile."""


def _run(verb: Verb, tiling: Tiling, moe: OverlappingMoE, x: ChunkState) -> None:
    OPS[verb.untiled](moe, x, tiling, moe.op(verb.kind, x, verb.tile))


class _Tiles(ModelPart):
    def ops(self, segment: Segment, dispatch: Dispatch, ops: ForwardOps) -> ForwardOps:
        """The ops of each tile, and of the rows that stay."""
        tiling = Tiling.of(segment.in_tiles(dispatch))
        if tiling is None:
            return {}
        parts = (None, *range(tiling.most_cuts))
        verbs = [type(verb)(verb.kind, tile) for verb in OPS for tile in parts]
        return {verb: partial(_run, verb, tiling) for verb in verbs}

    def check_plan(self, plan: Plan, model: Any, max_expert_rows: int | None) -> None:
        """
        Args:
            max_expert_rows: rows of a chunk that a rank's experts may work on at a time; None for any number.

        Raises:
            UsageError: the plan has tiles, and the model can't run it.
        """
        is_quantized = model.config.fp8 is not None or model.config.fp4 is not None
        why_not = model_blocker(is_quantized, max_expert_rows is not None) if plan.has_tiles else None
        if why_not is not None:
            raise UsageError(
                f"this model cannot run a tiled plan: {why_not.reason}. Use a plan without tiles, or {why_not.advice}."
            )


TILES = _Tiles()
