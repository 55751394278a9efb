"""Puts costs on the instructions of ``schedule/turns.py``, which say what the model runs in which order."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import NamedTuple

from megatron_lancet.files import RecordError
from megatron_lancet.planning.distinct_rows import DistinctParts, HopParts
from megatron_lancet.planning.profile import ChunkRouting, ModelFacts, Profile
from megatron_lancet.planning.simulation.cost_model import CostModel, DwCost
from megatron_lancet.schedule.layers import LayerKind
from megatron_lancet.schedule.ops import BETWEEN_NODES, COMBINES, INSIDE_NODE, OpKind, Phase
from megatron_lancet.schedule.plan import ChunkDim, Dispatch, Segment
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
_EVEN = 1e-9
_MAX_RANKS_WITH_ROUTING = 8
"""Larger groups are simulated by their shares only, which keeps simulations quick."""


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


@dataclass(frozen=True)
class Loads:
    """Received rows by rank. Ranks that receive equally many behave alike, so one of them is simulated for all.

    Attributes:
        shares: share of the group's routed rows that each rank receives.
        routing: rows of single chunks, by layer, dimension, chunk count and chunk; without an entry the shares hold.
    """

    shares: tuple[float, ...]
    routing: Mapping[tuple[int, ChunkDim, int, int], ChunkRouting] = field(default_factory=dict)

    @staticmethod
    def of(model: ModelFacts, shares: Sequence[float] | None) -> "Loads":
        """Checks and normalises shares; None for equal ones.

        Raises:
            RecordError: the number of shares is not that of the group's ranks, or one is out of range.
        """
        given = tuple(shares) if shares else (1.0 / model.ep_size,) * model.ep_size
        if len(given) != model.ep_size:
            raise RecordError(f"expected {model.ep_size} shares, one per rank of the group, found {len(given)}")
        total = sum(given)
        if min(given) < 0 or not 0 < total < float("inf"):
            raise RecordError(f"expected shares of at least 0 that sum to 1, found {given}")
        return Loads(tuple(share / total for share in given))

    @staticmethod
    def measured(profile: Profile) -> "Loads":
        """Returns the loads of a profile; chunk by chunk in a small group, of which then every rank is simulated."""
        loads = Loads.of(profile.model, profile.received_share)
        if profile.model.ep_size > _MAX_RANKS_WITH_ROUTING:
            return loads
        return Loads(
            loads.shares,
            {(one.layer, one.chunk_dim, one.num_chunks, one.chunk): one for one in profile.routing},
        )

    @cached_property
    def simulated(self) -> tuple[int, ...]:
        """The simulated ranks: the first of each distinct share."""
        return tuple(ranks[0] for ranks in self.alike)

    @cached_property
    def same_ranks(self) -> tuple[int, ...]:
        """Number of ranks that each simulated one represents, itself included."""
        return tuple(len(ranks) for ranks in self.alike)

    @cached_property
    def alike(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that each simulated one represents."""
        if self.routing:
            return tuple((rank,) for rank in range(len(self.shares)))
        groups: list[list[int]] = []
        for rank, share in enumerate(self.shares):
            same = next((ranks for ranks in groups if abs(share - self.shares[ranks[0]]) <= _EVEN), None)
            if same is None:
                groups.append([rank])
            else:
                same.append(rank)
        return tuple(map(tuple, groups))


class _Rows(NamedTuple):
    """Rows of a message of a chunk in a layer, by simulated rank.

    Attributes:
        sent: rows that it sends to others in a dispatch.
        returned: rows that it sends back to others.
    """

    sent: Sequence[int]
    returned: Sequence[int]


class _Pieces(NamedTuple):
    """How the micro-batch is cut at an instruction."""

    dim: ChunkDim = ChunkDim.BATCH
    num_chunks: int = 1
    multiple: int = 1


_WHOLE = _Pieces()


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
        self._shares = [loads.shares[rank] for rank in loads.simulated]
        self._actions: dict[tuple[object, ...], Action] = {}
        self._model = costs.model
        self._layers: dict[tuple[LayerKind, int, Dispatch], Layer] = {}

    @cached_property
    def _distinct(self) -> DistinctParts:
        """Parts of the rows that remain without duplicates, of the simulated ranks."""
        parts = DistinctParts.of(self._model, self.loads.shares, self.costs.profile.routing)
        ranks = self.loads.simulated
        sent, returned = (tuple(of_ranks[rank] for rank in ranks) for of_ranks in (parts.sent, parts.returned))
        return DistinctParts(sent, returned, parts.of_all)

    @cached_property
    def _hops(self) -> HopParts:
        """Rows of two hops for each token, of the simulated ranks: means over those that each of them represents."""
        return HopParts.of(self._model, self.loads.shares, self.costs.profile.routing).of_ranks(self.loads.alike)

    def forward(
        self, layers: Sequence[tuple[int, LayerKind]], segment: Segment, dispatch: Dispatch = Dispatch.PLAIN
    ) -> list[Step]:
        """Steps of a segment's layers, forward.

        Args:
            layers: global number and kind of each.
            dispatch: what all-to-alls carry; the model must be able to use it.
        """
        kinds = dict(layers)
        pieces = _WHOLE
        steps: list[Step] = []
        verbs = [(number, self._verbs(number, kind, segment.num_chunks, dispatch)) for number, kind in layers]
        for instruction in program(verbs, segment.num_chunks, segment.range, segment.hop_turns):
            if isinstance(instruction, Instruction):
                number, code = instruction.layer, _CODES.get(type(instruction.verb))
                if code is not None:
                    steps.append((code, number, self._action(instruction, kinds[number], pieces, dispatch)))
            elif isinstance(instruction, Cut):
                pieces = _Pieces(segment.chunk_dim, segment.num_chunks, segment.chunk_multiple)
            else:
                steps += self._cut(pieces)
                pieces = _WHOLE
        return steps

    def _verbs(self, number: int, kind: LayerKind, num_chunks: int, dispatch: Dispatch) -> Layer:
        key = kind, num_chunks, dispatch
        if key not in self._layers:
            model = self._model
            self._layers[key] = verbs_of(kind, model.has_shared_experts, model.pads_to_capacity, num_chunks, dispatch)
        return mtp_layer(self._layers[key]) if number in self._model.mtp_layers else self._layers[key]

    def beside(self, kind: OpKind) -> list[Step]:
        """Embedding or head, on the whole micro-batch."""
        action = self._compute(kind, LayerKind.NONE, _WHOLE, 0)
        if kind == OpKind.HEAD:
            of_all_uses = tuple(grads * self._model.num_output_uses for grads in action.weight_grads)
            action = replace(action, weight_grads=of_all_uses)
        return [(COMPUTE, 0, action)] if _takes_time(action) else []

    def _cut(self, pieces: _Pieces) -> list[Step]:
        """Splitting and concatenating together, behind the segment."""
        key = (OpKind.CUT, pieces)
        if key not in self._actions:
            num_tokens = float(sum(self.costs.chunk_tokens(*pieces)))
            self._actions[key] = self._compute(OpKind.CUT, LayerKind.NONE, pieces, 0, [num_tokens] * len(self._shares))
        action = self._actions[key]
        return [(COMPUTE, 0, action)] if _takes_time(action) else []

    def _action(self, instruction: Instruction, layer: LayerKind, pieces: _Pieces, dispatch: Dispatch) -> Action:
        verb, number, chunk = instruction
        routing = self.loads.routing.get((number, pieces.dim, pieces.num_chunks, chunk)) if self.loads.routing else None
        layers_back = number - self._model.owner_of_weights(number)
        key = (type(verb), verb.kind, layer, pieces, chunk, None if routing is None else number, layers_back, dispatch)
        action = self._actions.get(key)
        if action is None:
            action = self._costs_of(verb, layer, pieces, chunk, routing, dispatch)
            if layers_back:
                grads = (tuple(cost._replace(layers_back=layers_back) for cost in its) for its in action.weight_grads)
                action = replace(action, weight_grads=tuple(grads))
            self._actions[key] = action
        return action

    def _costs_of(
        self,
        verb: Verb,
        layer: LayerKind,
        pieces: _Pieces,
        chunk: int,
        routing: ChunkRouting | None,
        dispatch: Dispatch,
    ) -> Action:
        if isinstance(verb, LaunchCounts):
            return Action(COUNTS, verb.kind, chunk, (), (), slot=_slot(OpKind.DISPATCH, chunk))
        if isinstance(verb, Compute):
            received = self._received(pieces, chunk, routing) if verb.kind is OpKind.EXPERTS else None
            if verb.kind in _SCALED and not self.costs.is_profiled(layer, verb.kind):
                return self._between_hops(verb.kind, layer, pieces, chunk)
            kind = LayerKind.MTP if verb.kind is OpKind.MTP_PROJECTION else layer
            return self._compute(verb.kind, kind, pieces, chunk, received, dispatch)
        if dispatch is Dispatch.TWO_HOP:
            rows = self._rows_of_hop(verb.kind, pieces, chunk, routing)
        else:
            rows = self._rows(pieces, chunk, routing)
            if dispatch is Dispatch.DEDUP:
                rows = self._without_duplicates(rows, routing)
        return self._message(verb, chunk, rows, dispatch)

    def _received(self, pieces: _Pieces, chunk: int, routing: ChunkRouting | None) -> list[float]:
        """Rows that the experts of each simulated rank get."""
        if routing is not None:
            return list(routing.received)
        own, num_ranks = self._own_rows(pieces, chunk), len(self.loads.shares)
        return [own * share * num_ranks for share in self._shares]

    def _own_rows(self, pieces: _Pieces, chunk: int) -> int:
        """Rows of a rank's own tokens."""
        return self.costs.chunk_tokens(*pieces)[chunk] * self.costs.model.topk

    def _rows(self, pieces: _Pieces, chunk: int, routing: ChunkRouting | None) -> _Rows:
        """A rank keeps the rows that go from itself to itself."""
        own = self._own_rows(pieces, chunk)
        if routing is not None:
            kept = [own - sent for sent in routing.sent]
            returned = [received - stays for received, stays in zip(routing.received, kept, strict=True)]
            return _Rows(list(routing.sent), returned)
        num_ranks = len(self.loads.shares)
        return _Rows(
            [round(own * (1 - share)) for share in self._shares],
            [round(own * share * (num_ranks - 1)) for share in self._shares],
        )

    def _without_duplicates(self, rows: _Rows, routing: ChunkRouting | None) -> _Rows:
        """The rows of deduplicated messages: those that were recorded, or the expected part of the plain ones."""
        if routing is not None and routing.sent_tokens is not None and routing.received_tokens is not None:
            return _Rows(routing.sent_tokens, routing.received_tokens)
        sent, returned = (
            [round(number * part) for number, part in zip(of_ranks, parts, strict=True)]
            for of_ranks, parts in ((rows.sent, self._distinct.sent), (rows.returned, self._distinct.returned))
        )
        return _Rows(sent, returned)

    def _rows_of_hop(self, kind: OpKind, pieces: _Pieces, chunk: int, routing: ChunkRouting | None) -> _Rows:
        """The rows of a message of two hops: those that were recorded, or the expected ones."""
        hops = None if routing is None else routing.hops
        if hops is None:
            hops = self._hops.rows(self.costs.chunk_tokens(*pieces)[chunk])
        if kind in BETWEEN_NODES:
            return _Rows(hops.node_sent, hops.node_received)
        return _Rows(hops.local_sent, hops.local_received)

    def _between_hops(self, op: OpKind, layer: LayerKind, pieces: _Pieces, chunk: int) -> Action:
        """An op between two hops that was not profiled: the time of a similar one, in proportion to the rows."""
        similar = self._compute(_SCALED[op], layer, pieces, chunk)
        factors = [rows / self._model.topk for rows in self._hops.passed_on]
        forward_ms, backward_ms = (
            tuple(ms * factor for ms, factor in zip(times_ms, factors, strict=True))
            for times_ms in (similar.forward_ms, similar.backward_ms)
        )
        return Action(COMPUTE, op, chunk, forward_ms, backward_ms, weight_grads=((),) * len(factors))

    def _compute(
        self,
        op: OpKind,
        layer: LayerKind,
        pieces: _Pieces,
        chunk: int,
        rows: Sequence[float] | None = None,
        dispatch: Dispatch = Dispatch.PLAIN,
    ) -> Action:
        """
        Args:
            rows: rows that the op works on, by simulated rank; None for the chunk's tokens.
        """
        costs, dim, num_chunks = self.costs, pieces.dim, pieces.num_chunks
        if rows is None:
            rows = [float(costs.chunk_tokens(*pieces)[chunk])] * len(self._shares)
        forward_ms, backward_ms = (
            tuple(costs.op_ms(layer, op, phase, dim, num_chunks, chunk, number, dispatch) for number in rows)
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

    def _message(self, verb: Verb, chunk: int, rows: _Rows, dispatch: Dispatch) -> Action:
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
            slot=_slot(verb.kind, chunk),
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
