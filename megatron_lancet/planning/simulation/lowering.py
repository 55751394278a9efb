"""Puts costs on the instructions of ``schedule/turns.py``, which say what the model runs in which order."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from megatron_lancet.planning.dispatch import DispatchCosts, costs_of
from megatron_lancet.planning.simulation.cost_model import CostModel, DwCost
from megatron_lancet.planning.simulation.rows import Chunk, Loads, Pieces, RowCounts, Rows
from megatron_lancet.schedule.dispatch import PLAIN, Dispatch
from megatron_lancet.schedule.layers import LayerKind
from megatron_lancet.schedule.ops import COMBINES, INSIDE_NODE, OpKind, Phase
from megatron_lancet.schedule.plan import Segment
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


class EndBackward(Verb):
    """End the backward of a pair: what it has deferred runs."""


_IN_STEPS = (Compute, LaunchCounts, Launch, Wait)
"""Other verbs take no step of their own: the residual's time is in the time of its op."""
_SLOTS_OF_TILE = 4096
"""Most messages of one tile of a layer; messages of tile t have the slots from t times this on."""
_SLOTS = 1024 * _SLOTS_OF_TILE
"""Most messages of a layer."""


@dataclass(frozen=True, eq=False, slots=True)
class Action:
    """One thing that a chunk does in a layer, with its costs on each simulated rank.

    Attributes:
        kind: kind of the op.
        chunk: index of the chunk.
        forward_ms: time of the compute op, or of the message alone on its link.
        backward_ms: like ``forward_ms``, in the backward.
        forward_bytes: bytes of the message that go to other ranks.
        backward_bytes: like ``forward_bytes``, in the backward.
        forward_queued_ms: delay of the message's arrival after the arrival of the message in front of it on the link.
        backward_queued_ms: like ``forward_queued_ms``, in the backward.
        weight_grads: dWs that become ready in the backward.
        slot: separates the messages and counts of a layer.
        tile: index of the part of the chunk's rows; None for all of them.
        forward_host_ms: time in which the host launches a compute op.
        backward_host_ms: the same in the backward.
    """

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
    forward_host_ms: float = 0.0
    backward_host_ms: float = 0.0


Step = tuple[type[Verb], int, Action]
"""Verb, place and action. The place is the global layer number, 0 outside the layers; in pairs see :func:`at_place`."""
BESIDE = 1 << 20
"""Bit of a place: the step belongs to a forward that is paired with a backward."""
IN_PASS = 2 * BESIDE - 1
"""Mask of a place: layer number and :data:`BESIDE`, without the micro-batch."""


def at_place(layer: int, micro_batch: int, is_forward: bool) -> int:
    """The place of a layer in steps of several passes, which separates messages of the same name."""
    return layer + is_forward * BESIDE + micro_batch * 2 * BESIDE


def layer_at(place: int) -> int:
    """The global layer number of a place; 0 outside the layers."""
    return place & (BESIDE - 1)


def key_of(place: int, action: Action) -> int:
    """Tells the messages of a phase apart, and the exchanges of counts."""
    return place * _SLOTS + action.slot


def counts_key(key: int) -> int:
    """The key of the counts that a dispatch with this key waits for: all tiles of a chunk wait for the same."""
    return key // _SLOTS * _SLOTS + key % _SLOTS_OF_TILE


_WHOLE = Pieces()


class Lowering:
    """Makes the steps of segments; what a verb costs on a chunk is computed once."""

    def __init__(self, costs: CostModel, loads: Loads) -> None:
        self.costs = costs
        self.loads = loads
        self._counts = RowCounts(costs, loads)
        self._model = costs.model
        self._ways: dict[Dispatch, _Way] = {}

    def forward(
        self, layers: Sequence[tuple[int, LayerKind]], segment: Segment, dispatch: Dispatch = PLAIN
    ) -> list[Step]:
        """Steps of a segment's layers, forward.

        Args:
            layers: global number and kind of each.
            dispatch: what all-to-alls carry; the model must be able to use it.
        """
        kinds = dict(layers)
        pieces, way = _WHOLE, self._way(segment.in_tiles(dispatch))
        steps: list[Step] = []
        verbs = [(number, self._verbs(number, kind, segment.num_chunks, way)) for number, kind in layers]
        for instruction in program(verbs, segment.num_chunks, segment.range, self._model.wiring):
            if isinstance(instruction, Instruction):
                number, verb = instruction.layer, type(instruction.verb)
                if verb in _IN_STEPS:
                    steps.append((verb, number, self._action(instruction, kinds[number], pieces, way)))
            elif isinstance(instruction, Cut):
                pieces = Pieces(segment.chunk_dim, segment.num_chunks, segment.chunk_multiple)
            else:
                steps += self._cut(pieces)
                pieces = _WHOLE
        return steps

    def _way(self, dispatch: Dispatch) -> "_Way":
        if dispatch not in self._ways:
            self._ways[dispatch] = _Way(costs_of(dispatch, self._counts))
        return self._ways[dispatch]

    def _verbs(self, number: int, kind: LayerKind, num_chunks: int, way: "_Way") -> Layer:
        key = kind, num_chunks
        if key not in way.layers:
            model, dispatch = self._model, way.costs.dispatch
            way.layers[key] = verbs_of(kind, model.has_shared_experts, model.pads_to_capacity, num_chunks, dispatch)
        return mtp_layer(way.layers[key]) if number in self._model.mtp_layers else way.layers[key]

    def beside(self, kind: OpKind) -> list[Step]:
        """Embedding or head, on the full micro-batch."""
        action = self._compute(Compute(kind), LayerKind.NONE, Chunk(_WHOLE, 0), self._way(PLAIN).costs)
        if kind == OpKind.HEAD:
            of_all_uses = tuple(grads * self._model.num_output_uses for grads in action.weight_grads)
            action = replace(action, weight_grads=of_all_uses)
        return [(Compute, 0, action)] if _takes_time(action) else []

    def _cut(self, pieces: Pieces) -> list[Step]:
        """Splitting and concatenating together, behind the segment."""
        way = self._way(PLAIN)
        key = (OpKind.CUT, pieces)
        if key not in way.actions:
            num_tokens = [float(sum(self.costs.chunk_tokens(*pieces)))] * len(self.loads.simulated)
            verb, chunk = Compute(OpKind.CUT), Chunk(pieces, 0)
            way.actions[key] = self._compute(verb, LayerKind.NONE, chunk, way.costs, num_tokens)
        action = way.actions[key]
        return [(Compute, 0, action)] if _takes_time(action) else []

    def _action(self, instruction: Instruction, layer: LayerKind, pieces: Pieces, way: "_Way") -> Action:
        verb, number, chunk, _ = instruction
        routing = self.loads.routing.get((number, pieces.dim, pieces.num_chunks, chunk)) if self.loads.routing else None
        layers_back = number - self._model.owner_of_weights(number)
        where = None if routing is None else number
        key = (type(verb), verb.kind, verb.tile, layer, pieces, chunk, where, layers_back)
        action = way.actions.get(key)
        if action is None:
            action = self._costs_of(verb, layer, Chunk(pieces, chunk, routing), way.costs)
            if layers_back:
                grads = (tuple(cost._replace(layers_back=layers_back) for cost in its) for its in action.weight_grads)
                action = replace(action, weight_grads=tuple(grads))
            way.actions[key] = action
        return action

    def _costs_of(self, verb: Verb, layer: LayerKind, chunk: Chunk, costs: DispatchCosts) -> Action:
        if isinstance(verb, LaunchCounts):
            return Action(verb.kind, chunk.number, (), (), slot=_slot(OpKind.DISPATCH, chunk.number))
        if not isinstance(verb, Compute):
            return self._message(verb, chunk, costs)
        similar = costs.dispatch.similar_ops.get(verb.kind)
        if similar is not None and not self.costs.is_profiled(layer, verb.kind):
            return self._like(similar, verb, layer, chunk, costs)
        kind = LayerKind.MTP if verb.kind is OpKind.MTP_PROJECTION else layer
        return self._compute(verb, kind, chunk, costs, costs.op_rows(verb, chunk))

    def _like(self, similar: OpKind, verb: Verb, layer: LayerKind, chunk: Chunk, costs: DispatchCosts) -> Action:
        """An op that was not profiled: the time of a similar one, in proportion to the rows."""
        plain = self._compute(Compute(similar), layer, chunk, self._way(PLAIN).costs)
        factors = costs.rows_per_plain_row(verb.kind)
        forward_ms, backward_ms = (
            tuple(ms * factor for ms, factor in zip(times_ms, factors, strict=True))
            for times_ms in (plain.forward_ms, plain.backward_ms)
        )
        no_weight_grads: tuple[tuple[DwCost, ...], ...] = ((),) * len(factors)
        return replace(
            plain, kind=verb.kind, forward_ms=forward_ms, backward_ms=backward_ms, weight_grads=no_weight_grads
        )

    def _compute(
        self,
        verb: Verb,
        layer: LayerKind,
        chunk: Chunk,
        costs: DispatchCosts,
        rows: Sequence[float] | None = None,
    ) -> Action:
        """
        Args:
            rows: rows that the op works on, by simulated rank; None for the chunk's tokens.
        """
        if rows is None:
            rows = [float(self._counts.tokens(chunk))] * len(self.loads.simulated)
        forward_ms, backward_ms = (
            tuple(costs.op_ms(layer, verb.kind, phase, chunk, number) for number in rows)
            for phase in (Phase.FORWARD, Phase.INPUT_GRAD)
        )
        grads = costs.weight_grads(layer, verb, chunk, rows)
        host_ms = (
            self.costs.op_host_ms(layer, verb.kind, phase, chunk.cut.dim, chunk.cut.num_chunks, chunk.number)
            for phase in (Phase.FORWARD, Phase.INPUT_GRAD)
        )
        return Action(verb.kind, chunk.number, forward_ms, backward_ms, (), (), (), (), grads, 0, verb.tile, *host_ms)

    def _message(self, verb: Verb, chunk: Chunk, costs: DispatchCosts) -> Action:
        """Launching a message, or waiting for it. The gradient goes the other way."""
        rows = costs.rows(verb, chunk)
        if verb.kind in COMBINES:
            row_bytes, rows = self.costs.model.combine_row_bytes, Rows(rows.returned, rows.sent)
        else:
            row_bytes = costs.row_bytes(verb.kind)
        sent, sent_back = (tuple(number * row_bytes for number in its) for its in (rows.sent, rows.returned))
        alone, queued = (partial(one, kind=verb.kind) for one in (self.costs.message_ms, self.costs.queued_ms))
        return Action(
            verb.kind,
            chunk.number,
            self._message_ms(alone, sent),
            self._message_ms(alone, sent_back),
            sent,
            sent_back,
            forward_queued_ms=self._message_ms(queued, sent),
            backward_queued_ms=self._message_ms(queued, sent_back),
            slot=_slot(verb.kind, chunk.number) + _SLOTS_OF_TILE * (verb.tile or 0),
            tile=verb.tile,
        )

    def _message_ms(self, one_ms: Callable[[float], float], num_bytes: tuple[int, ...]) -> tuple[float, ...]:
        if self.costs.profile.link.sends_share_link:
            return tuple(one_ms(number) for number in num_bytes)
        return (one_ms(max(num_bytes)),) * len(num_bytes)


class _Way:
    """A dispatch's verbs of layers, and their costs."""

    def __init__(self, costs: DispatchCosts) -> None:
        self.costs = costs
        self.layers: dict[tuple[LayerKind, int], Layer] = {}
        self.actions: dict[tuple[object, ...], Action] = {}


def _slot(message: OpKind, chunk: int) -> int:
    return 4 * chunk + 2 * (message in INSIDE_NODE) + (message in COMBINES)


def _takes_time(action: Action) -> bool:
    return any(action.forward_ms + action.backward_ms) or any(action.weight_grads)


def backward(steps: Sequence[Step]) -> list[Step]:
    """The backward order of a forward order: its mirror."""
    return [(MIRRORED[verb], layer, action) for verb, layer, action in reversed(steps) if verb in MIRRORED]
