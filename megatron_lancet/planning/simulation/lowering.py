"""Puts costs on the instructions of ``schedule/turns.py``, which say what the model runs in which order."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from megatron_lancet.planning.profile import ChunkRouting, ModelFacts
from megatron_lancet.planning.simulation.cost_model import CostModel, DwCost
from megatron_lancet.planning.simulation.rows import Loads, Pieces, RowCounts, Rows
from megatron_lancet.schedule.layers import LayerKind
from megatron_lancet.schedule.ops import BETWEEN_NODES, COMBINES, INSIDE_NODE, OpKind, Phase
from megatron_lancet.schedule.plan import Dispatch, OwnRows, Segment
from megatron_lancet.schedule.turns import (
    MIRRORED,
    Compute,
    Cut,
    Instruction,
    Launch,
    LaunchCounts,
    Layer,
    Verb,
    Wait,
    mtp_layer,
    program,
    verbs_of,
)

COMPUTE, COUNTS, ISSUE, WAIT, END = range(5)
"""What a step does. ``END`` ends the backward of a pair: what it has deferred runs."""
_CODES: dict[type[Verb], int] = {Compute: COMPUTE, LaunchCounts: COUNTS, Launch: ISSUE, Wait: WAIT}
"""Other verbs take no step of their own: the residual's time is in the op's that it belongs to."""
_SCALED = {OpKind.NODE_ROWS: OpKind.PREPROCESS, OpKind.NODE_SUMS: OpKind.POSTPROCESS}
"""Of the ops between two hops, those that move rows in a similar way."""
_SLOTS_OF_TILE = 4096
"""Most messages of one tile of a layer; those of tile t have the slots from t times this on."""
_SLOTS = 1024 * _SLOTS_OF_TILE
"""Most messages of a layer."""


@dataclass(frozen=True, eq=False, slots=True)
class Action:
    """One thing that a chunk does in a layer, with its costs on each simulated rank.

    Attributes:
        code: compute, counts, issue or wait, forward.
        kind: kind of the op.
        chunk: index of the chunk.
        forward_ms: time of the compute op, or of the message alone on its link.
        backward_ms: like ``forward_ms``, in the backward.
        forward_bytes: bytes of the message that go to other ranks.
        backward_bytes: like ``forward_bytes``, in the backward.
        forward_queued_ms: delay of the message's arrival after that of the message in front of it on the link.
        backward_queued_ms: like ``forward_queued_ms``, in the backward.
        weight_grads: dWs that become ready in the backward.
        slot: tells the messages and counts of a layer apart.
        tile: index of the part of the chunk's rows; None for all of them.
    """

    code: int
    kind: str
    chunk: int
    forward_ms: tuple[float, ...]
    backward_ms: tuple[float, ...]
    forward_bytes: tuple[int, ...] = ()
    backward_bytes: tuple[int, ...] = ()
    forward_queued_ms: tuple[float, ...] = ()
    backward_queued_ms: tuple[float, ...] = ()
    weight_grads: tuple[tuple[DwCost, ...], ...] = ()
    slot: int = 0
    tile: int | None = None


Step = tuple[int, int, Action]
"""Code, place and action. The place is the global layer number, 0 beside the layers; in pairs see :func:`at_place`."""
BESIDE = 1 << 20
"""Bit of a place: the step belongs to a forward that runs beside a backward."""
IN_PASS = 2 * BESIDE - 1
"""Mask of a place: layer number and :data:`BESIDE`, without the micro-batch."""


def at_place(layer: int, micro_batch: int, is_forward: bool) -> int:
    """The place of a layer in steps of several passes, by which messages of the same name are told apart."""
    return layer + is_forward * BESIDE + micro_batch * 2 * BESIDE


def layer_at(place: int) -> int:
    """The global layer number of a place; 0 beside the layers."""
    return place & (BESIDE - 1)


def key_of(place: int, action: Action) -> int:
    """Tells the messages of a phase apart, and the exchanges of counts."""
    return place * _SLOTS + action.slot


def counts_key(key: int) -> int:
    """The key of the counts that a dispatch with this key waits for: all tiles of a chunk wait for the same."""
    return key // _SLOTS * _SLOTS + key % _SLOTS_OF_TILE


class _Tiles(NamedTuple):
    """How the rows of a chunk are cut; see :class:`~megatron_lancet.schedule.plan.Segment`."""

    number: int = 0
    own_rows: OwnRows = OwnRows.HALF

    @property
    def num_own_parts(self) -> int:
        """Parts in which the experts work on the rows that stay on the rank."""
        return 2 if self.own_rows is OwnRows.HALF else 1

    def is_first(self, verb: Verb) -> bool:
        """Whether a part of the experts is the first one of a forward, so the last one of a backward."""
        first = OpKind.EXPERTS if self.own_rows is OwnRows.AFTER else OpKind.OWN_EXPERTS
        return verb.kind is first and not verb.tile


_WHOLE, _NO_TILES = Pieces(), _Tiles()


class Lowering:
    """Makes the steps of segments; what a verb costs on a chunk is computed once.

    Ops have the times that were measured with the dispatch. Where none were, they have the plain one's: what the sender
    no longer copies the receiver does, when it makes the rows of its experts and sums their outputs, so that each moves
    about as many rows as before. No op is longer or shorter by more than the copy of the rows that are saved.

    Two hops have two ops more. If the profile has no times of them, making the rows of the second hop takes as long for
    each row as ``preprocess`` takes for a plain one, and summing what comes back as long as ``postprocess``.
    """

    def __init__(self, costs: CostModel, loads: Loads) -> None:
        self.costs = costs
        self.loads = loads
        self._rows = RowCounts(costs, loads)
        self._actions: dict[tuple[object, ...], Action] = {}
        self._model = costs.model
        self._layers: dict[tuple[LayerKind, int, Dispatch, _Tiles], Layer] = {}

    def forward(
        self, layers: Sequence[tuple[int, LayerKind]], segment: Segment, dispatch: Dispatch = Dispatch.PLAIN
    ) -> list[Step]:
        """Steps of a segment's layers, forward.

        Args:
            layers: global number and kind of each.
            dispatch: what all-to-alls carry; the model must be able to use it.
        """
        kinds = dict(layers)
        pieces, tiles = _WHOLE, _Tiles(segment.tiles, segment.own_rows) if segment.tiles else _NO_TILES
        steps: list[Step] = []
        verbs = [(number, self._verbs(number, kind, segment.num_chunks, dispatch, tiles)) for number, kind in layers]
        for instruction in program(verbs, segment.num_chunks, segment.range):
            if isinstance(instruction, Instruction):
                number, code = instruction.layer, _CODES.get(type(instruction.verb))
                if code is not None:
                    action = self._action(instruction, kinds[number], pieces, dispatch, tiles)
                    steps.append((code, number, action))
            elif isinstance(instruction, Cut):
                pieces = Pieces(segment.chunk_dim, segment.num_chunks, segment.chunk_multiple)
            else:
                steps += self._cut(pieces)
                pieces = _WHOLE
        return steps

    def _verbs(self, number: int, kind: LayerKind, num_chunks: int, dispatch: Dispatch, tiles: _Tiles) -> Layer:
        key = kind, num_chunks, dispatch, tiles
        if key not in self._layers:
            model = self._model
            self._layers[key] = verbs_of(
                kind, model.has_shared_experts, model.pads_to_capacity, num_chunks, dispatch, *tiles
            )
        return mtp_layer(self._layers[key]) if number in self._model.mtp_layers else self._layers[key]

    def beside(self, kind: OpKind) -> list[Step]:
        """Embedding or head, on the whole micro-batch."""
        action = self._compute(kind, LayerKind.NONE, _WHOLE, 0)
        if kind == OpKind.HEAD:
            of_all_uses = tuple(grads * self._model.num_output_uses for grads in action.weight_grads)
            action = replace(action, weight_grads=of_all_uses)
        return [(COMPUTE, 0, action)] if _takes_time(action) else []

    def _cut(self, pieces: Pieces) -> list[Step]:
        """Splitting and concatenating together, behind the segment."""
        key = (OpKind.CUT, pieces)
        if key not in self._actions:
            num_tokens = [float(sum(self.costs.chunk_tokens(*pieces)))] * len(self.loads.simulated)
            self._actions[key] = self._compute(OpKind.CUT, LayerKind.NONE, pieces, 0, num_tokens)
        action = self._actions[key]
        return [(COMPUTE, 0, action)] if _takes_time(action) else []

    def _action(
        self, instruction: Instruction, layer: LayerKind, pieces: Pieces, dispatch: Dispatch, tiles: _Tiles
    ) -> Action:
        verb, number, chunk, _ = instruction
        routing = self.loads.routing.get((number, pieces.dim, pieces.num_chunks, chunk)) if self.loads.routing else None
        layers_back = number - self._model.owner_of_weights(number)
        where = None if routing is None else number
        key = (type(verb), verb.kind, verb.tile, layer, pieces, chunk, where, layers_back, dispatch, tiles)
        action = self._actions.get(key)
        if action is None:
            action = self._costs_of(verb, layer, pieces, chunk, routing, dispatch, tiles)
            if layers_back:
                grads = (tuple(cost._replace(layers_back=layers_back) for cost in its) for its in action.weight_grads)
                action = replace(action, weight_grads=tuple(grads))
            self._actions[key] = action
        return action

    def _costs_of(
        self,
        verb: Verb,
        layer: LayerKind,
        pieces: Pieces,
        chunk: int,
        routing: ChunkRouting | None,
        dispatch: Dispatch,
        tiles: _Tiles,
    ) -> Action:
        if isinstance(verb, LaunchCounts):
            return Action(COUNTS, verb.kind, chunk, (), (), slot=_slot(OpKind.DISPATCH, chunk))
        if isinstance(verb, Compute):
            if tiles.number and verb.kind in (OpKind.OWN_EXPERTS, OpKind.EXPERTS):
                return self._part_of_experts(verb, layer, pieces, chunk, routing, dispatch, tiles)
            received = self._rows.received(pieces, chunk, routing) if verb.kind is OpKind.EXPERTS else None
            if verb.kind in _SCALED and not self.costs.is_profiled(layer, verb.kind):
                return self._between_hops(verb.kind, layer, pieces, chunk)
            kind = LayerKind.MTP if verb.kind is OpKind.MTP_PROJECTION else layer
            return self._compute(verb.kind, kind, pieces, chunk, received, dispatch, bool(tiles.number))
        rows = self._rows.of_message(verb.kind, pieces, chunk, routing, dispatch)
        if verb.tile is not None:
            rows = rows.of_tile(tiles.number, verb.tile)
        return self._message(verb, chunk, rows, dispatch)

    def _part_of_experts(
        self,
        verb: Verb,
        layer: LayerKind,
        pieces: Pieces,
        chunk: int,
        routing: ChunkRouting | None,
        dispatch: Dispatch,
        tiles: _Tiles,
    ) -> Action:
        """The experts on a part of a chunk's rows: of those that stay on the rank, or of one tile of those of others.

        A weight has one gradient, over all rows. It is ready behind the backward's last part.
        """
        received, kept = (one(pieces, chunk, routing) for one in (self._rows.received, self._rows.kept))
        if verb.kind is OpKind.OWN_EXPERTS:
            rows = [number / tiles.num_own_parts for number in kept]
        else:
            rows = [(number - stays) / tiles.number for number, stays in zip(received, kept, strict=True)]
        weight_grads: tuple[tuple[DwCost, ...], ...] = ((),) * len(rows)
        if tiles.is_first(verb):
            grads = partial(self.costs.weight_grads, layer, OpKind.EXPERTS, pieces.num_chunks)
            weight_grads = tuple(grads(number) for number in received)
        action = self._compute(verb.kind, layer, pieces, chunk, rows, dispatch, is_tiled=True)
        return replace(action, weight_grads=weight_grads, tile=verb.tile)

    def _between_hops(self, op: OpKind, layer: LayerKind, pieces: Pieces, chunk: int) -> Action:
        """An op between two hops that was not profiled: the time of a similar one, in proportion to the rows."""
        similar = self._compute(_SCALED[op], layer, pieces, chunk)
        factors = [rows / self._model.topk for rows in self._rows.passed_on]
        forward_ms, backward_ms = (
            tuple(ms * factor for ms, factor in zip(times_ms, factors, strict=True))
            for times_ms in (similar.forward_ms, similar.backward_ms)
        )
        return Action(COMPUTE, op, chunk, forward_ms, backward_ms, weight_grads=((),) * len(factors))

    def _compute(
        self,
        op: OpKind,
        layer: LayerKind,
        pieces: Pieces,
        chunk: int,
        rows: Sequence[float] | None = None,
        dispatch: Dispatch = Dispatch.PLAIN,
        is_tiled: bool = False,
    ) -> Action:
        """
        Args:
            rows: rows that the op works on, by simulated rank; None for the chunk's tokens.
            is_tiled: whether the chunk's rows go to other ranks in tiles.
        """
        costs, dim, num_chunks = self.costs, pieces.dim, pieces.num_chunks
        if rows is None:
            rows = [float(costs.chunk_tokens(*pieces)[chunk])] * len(self.loads.simulated)
        forward_ms, backward_ms = (
            tuple(costs.op_ms(layer, op, phase, dim, num_chunks, chunk, number, dispatch, is_tiled) for number in rows)
            for phase in (Phase.FORWARD, Phase.INPUT_GRAD)
        )
        return Action(
            COMPUTE,
            op,
            chunk,
            forward_ms,
            backward_ms,
            weight_grads=tuple(costs.weight_grads(layer, op, num_chunks, number) for number in rows),
        )

    def _message(self, verb: Verb, chunk: int, rows: Rows, dispatch: Dispatch) -> Action:
        """Launching a message, or waiting for it. The gradient goes the other way."""
        model = self.costs.model
        if verb.kind in COMBINES:
            sent = tuple(number * model.combine_row_bytes for number in rows.returned)
            sent_back = tuple(number * model.combine_grad_row_bytes for number in rows.sent)
        else:
            row_bytes, grad_row_bytes = _dispatch_row_bytes(model, verb.kind, dispatch)
            sent = tuple(number * row_bytes for number in rows.sent)
            sent_back = tuple(number * grad_row_bytes for number in rows.returned)
        alone, queued = (partial(one, kind=verb.kind) for one in (self.costs.message_ms, self.costs.queued_ms))
        return Action(
            _CODES[type(verb)],
            verb.kind,
            chunk,
            self._message_ms(alone, sent),
            self._message_ms(alone, sent_back),
            sent,
            sent_back,
            forward_queued_ms=self._message_ms(queued, sent),
            backward_queued_ms=self._message_ms(queued, sent_back),
            slot=_slot(verb.kind, chunk) + _SLOTS_OF_TILE * (verb.tile or 0),
            tile=verb.tile,
        )

    def _message_ms(self, one_ms: Callable[[float], float], num_bytes: tuple[int, ...]) -> tuple[float, ...]:
        if self.costs.profile.link.sends_share_link:
            return tuple(one_ms(number) for number in num_bytes)
        return (one_ms(max(num_bytes)),) * len(num_bytes)


def _dispatch_row_bytes(model: ModelFacts, kind: OpKind, dispatch: Dispatch) -> tuple[int, int]:
    """Bytes of one row of a dispatch, forward and backward."""
    if kind in BETWEEN_NODES:
        return model.node_row_bytes, model.node_grad_row_bytes
    if kind in INSIDE_NODE or dispatch is Dispatch.DEDUP:
        return model.dedup_row_bytes, model.dedup_grad_row_bytes
    return model.row_bytes, model.grad_row_bytes


def _slot(message: OpKind, chunk: int) -> int:
    return 4 * chunk + 2 * (message in INSIDE_NODE) + (message in COMBINES)


def _takes_time(action: Action) -> bool:
    return any(action.forward_ms + action.backward_ms) or any(action.weight_grads)


_MIRRORED = {_CODES[verb]: _CODES[mirrored] for verb, mirrored in MIRRORED.items()}


def backward(steps: Sequence[Step]) -> list[Step]:
    """The backward order of a forward order: its mirror."""
    return [(_MIRRORED[code], layer, action) for code, layer, action in reversed(steps) if code in _MIRRORED]
