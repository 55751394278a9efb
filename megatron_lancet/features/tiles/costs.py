"""Costs of a dispatch in tiles: the costs without tiles, in parts.

Experts that get their rows in tiles cost what they cost on as few rows. If a plan with tiles was profiled, each op is
scaled by the ratio of what was measured there to that.
"""

from collections.abc import Sequence
from functools import cache

from megatron_lancet.features.tiles.order import Tiled
from megatron_lancet.planning.dispatch import DispatchCosts, costs_of
from megatron_lancet.planning.simulation.cost_model import DwCost
from megatron_lancet.planning.simulation.rows import Chunk, RowCounts, Rows
from megatron_lancet.schedule.dispatch import Dispatch, LocalTokens
from megatron_lancet.schedule.layers import LayerKind
from megatron_lancet.schedule.ops import OpKind, Phase, Verb

_EXPERTS = (OpKind.OWN_EXPERTS, OpKind.EXPERTS)


class TiledCosts(DispatchCosts):
    """Messages and experts on a part of a chunk's rows each."""

    def __init__(self, dispatch: Dispatch, counts: RowCounts) -> None:
        super().__init__(dispatch, counts)
        assert isinstance(dispatch, Tiled), dispatch
        self._tiled = dispatch
        self._untiled = costs_of(dispatch.untiled, counts)
        self._factor = cache(self._measured_factor)

    def row_bytes(self, kind: OpKind) -> int:
        return self._untiled.row_bytes(kind)

    def rows(self, verb: Verb, chunk: Chunk) -> Rows:
        """The rows of one tile: tiles are as equal as possible."""
        tiles, tile = self._tiled.tiles, verb.tile
        assert tile is not None, verb
        untiled = self._untiled.rows(verb, chunk)
        return Rows(*([(tile + 1) * rows // tiles - tile * rows // tiles for rows in its] for its in untiled))

    def op_rows(self, verb: Verb, chunk: Chunk) -> Sequence[float] | None:
        """The experts work on local tokens, or on the tokens of one tile."""
        if verb.kind not in _EXPERTS:
            return self._untiled.op_rows(verb, chunk)
        kept = self.counts.kept(chunk)
        if verb.kind is OpKind.OWN_EXPERTS:
            return [number / self._tiled.num_own_parts for number in kept]
        received = self.counts.received(chunk)
        if not self._tiled.num_own_parts:
            return [number / self._tiled.tiles for number in received]
        return [(number - stays) / self._tiled.tiles for number, stays in zip(received, kept, strict=True)]

    def op_ms(self, layer: LayerKind, kind: OpKind, phase: Phase, chunk: Chunk, rows: float) -> float:
        like = _without_tiles(kind)
        return self._factor(layer, kind, phase) * self._untiled.op_ms(layer, like, phase, chunk, rows)

    def weight_grads(
        self, layer: LayerKind, verb: Verb, chunk: Chunk, rows: Sequence[float]
    ) -> tuple[tuple[DwCost, ...], ...]:
        """A weight has one gradient, over all rows. It is ready behind the backward's last part."""
        if verb.kind not in _EXPERTS:
            return self._untiled.weight_grads(layer, verb, chunk, rows)
        first = OpKind.OWN_EXPERTS if self._tiled.local_tokens is LocalTokens.HALF else OpKind.EXPERTS
        if verb.kind is not first or verb.tile:
            return ((),) * len(rows)
        grads = self.costs.weight_grads
        return tuple(
            grads(layer, OpKind.EXPERTS, chunk.cut.num_chunks, number) for number in self.counts.received(chunk)
        )

    def _measured_factor(self, layer: LayerKind, kind: OpKind, phase: Phase) -> float:
        """Time of an op with tiles over its time for the same rows without; 1 if no plan with tiles was profiled."""
        measured = self.costs.measured_in_tiles(layer, kind, phase)
        without_ms = sum(
            self.costs.op_ms(
                layer, _without_tiles(kind), phase, op.chunk_dim, op.num_chunks, op.chunk, op.rows, op.dispatch
            )
            for op in measured
        )
        return sum(op.ms for op in measured) / without_ms if without_ms > 0 else 1.0


def _without_tiles(kind: OpKind) -> OpKind:
    """The kind of op that does the same work on all rows."""
    return OpKind.EXPERTS if kind is OpKind.OWN_EXPERTS else kind
