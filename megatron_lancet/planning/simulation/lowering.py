"""Puts costs on the instructions of ``schedule/turns.py``, which say what the model runs in which order."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from megatron_lancet.files import RecordError
from megatron_lancet.planning.distinct_rows import DistinctParts
from megatron_lancet.planning.profile import ChunkRouting, ModelFacts, Profile
from megatron_lancet.planning.simulation.cost_model import CostModel, DwCost
from megatron_lancet.schedule.layers import LayerKind
from megatron_lancet.schedule.ops import OpKind, Phase
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
        if self.routing:
            return tuple(range(len(self.shares)))
        ranks: list[int] = []
        for rank, share in enumerate(self.shares):
            if all(abs(share - self.shares[other]) > _EVEN for other in ranks):
                ranks.append(rank)
        return tuple(ranks)

    @cached_property
    def same_ranks(self) -> tuple[int, ...]:
        """Number of ranks that each simulated one represents, itself included."""
        if self.routing:
            return (1,) * len(self.shares)
        return tuple(sum(abs(share - self.shares[rank]) <= _EVEN for share in self.shares) for rank in self.simulated)


class _Rows(NamedTuple):
    """Rows of a chunk in a layer, by simulated rank.

    Attributes:
        received: rows that its experts get.
        sent: rows that it sends to others.
        returned: rows that it sends back to others.
    """

    received: Sequence[float]
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

    Deduplicated dispatch changes the bytes of messages only. Its ops have the plain one's times: what the sender no
    longer copies the receiver does, when it makes the rows of its experts and sums their outputs, so that each moves
    about as many rows as before. No op is longer or shorter by more than the copy of the rows that are saved.
    """

    def __init__(self, costs: CostModel, loads: Loads) -> None:
        self.costs = costs
        self.loads = loads
        self._shares = [loads.shares[rank] for rank in loads.simulated]
        self._actions: dict[tuple[object, ...], Action] = {}
        self._model = costs.model
        self._layers: dict[tuple[LayerKind, int], Layer] = {}

    @cached_property
    def _distinct(self) -> DistinctParts:
        """Parts of the rows that remain without duplicates, of the simulated ranks."""
        parts = DistinctParts.of(self._model, self.loads.shares, self.costs.profile.routing)
        ranks = self.loads.simulated
        sent, returned = (tuple(of_ranks[rank] for rank in ranks) for of_ranks in (parts.sent, parts.returned))
        return DistinctParts(sent, returned, parts.of_all)

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
        verbs = [(number, self._verbs(number, kind, segment.num_chunks)) for number, kind in layers]
        for instruction in program(verbs, segment.num_chunks, segment.range):
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

    def _verbs(self, number: int, kind: LayerKind, num_chunks: int) -> Layer:
        key = kind, num_chunks
        if key not in self._layers:
            model = self._model
            self._layers[key] = verbs_of(kind, model.has_shared_experts, model.pads_to_capacity, num_chunks)
        return mtp_layer(self._layers[key]) if number in self._model.mtp_layers else self._layers[key]

    def beside(self, kind: str) -> list[Step]:
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
            received = self._rows(pieces, chunk, routing).received if verb.kind is OpKind.EXPERTS else None
            kind = LayerKind.MTP if verb.kind is OpKind.MTP_PROJECTION else layer
            return self._compute(verb.kind, kind, pieces, chunk, received)
        rows = self._rows(pieces, chunk, routing)
        if dispatch is Dispatch.DEDUP:
            rows = self._without_duplicates(rows, routing)
        return self._message(verb, chunk, rows, dispatch)

    def _rows(self, pieces: _Pieces, chunk: int, routing: ChunkRouting | None) -> _Rows:
        """A rank keeps the rows that go from itself to itself."""
        own = self.costs.chunk_tokens(*pieces)[chunk] * self.costs.model.topk
        if routing is not None:
            kept = [own - sent for sent in routing.sent]
            returned = [received - stays for received, stays in zip(routing.received, kept, strict=True)]
            return _Rows(list(routing.received), list(routing.sent), returned)
        num_ranks = len(self.loads.shares)
        return _Rows(
            [own * share * num_ranks for share in self._shares],
            [round(own * (1 - share)) for share in self._shares],
            [round(own * share * (num_ranks - 1)) for share in self._shares],
        )

    def _without_duplicates(self, rows: _Rows, routing: ChunkRouting | None) -> _Rows:
        """The rows of deduplicated messages: those that were recorded, or the expected part of the plain ones."""
        if routing is not None and routing.sent_tokens is not None and routing.received_tokens is not None:
            return rows._replace(sent=routing.sent_tokens, returned=routing.received_tokens)
        sent, returned = (
            [round(number * part) for number, part in zip(of_ranks, parts, strict=True)]
            for of_ranks, parts in ((rows.sent, self._distinct.sent), (rows.returned, self._distinct.returned))
        )
        return rows._replace(sent=sent, returned=returned)

    def _compute(
        self, op: str, layer: LayerKind, pieces: _Pieces, chunk: int, rows: Sequence[float] | None = None
    ) -> Action:
        """
        Args:
            rows: rows that the op works on, by simulated rank; None for the chunk's tokens.
        """
        costs, dim, num_chunks = self.costs, pieces.dim, pieces.num_chunks
        if rows is None:
            rows = [float(costs.chunk_tokens(*pieces)[chunk])] * len(self._shares)
        return Action(
            COMPUTE,
            op,
            chunk,
            tuple(costs.op_ms(layer, op, Phase.FORWARD, dim, num_chunks, chunk, number) for number in rows),
            tuple(costs.op_ms(layer, op, Phase.INPUT_GRAD, dim, num_chunks, chunk, number) for number in rows),
            weight_grads=tuple(costs.weight_grads(layer, op, num_chunks, number) for number in rows),
        )

    def _message(self, verb: Verb, chunk: int, rows: _Rows, dispatch: Dispatch) -> Action:
        """Launching a message, or waiting for it. The gradient goes the other way."""
        model = self.costs.model
        row_bytes, grad_row_bytes = model.row_bytes, model.grad_row_bytes
        if dispatch is Dispatch.DEDUP:
            row_bytes, grad_row_bytes = model.dedup_row_bytes, model.dedup_grad_row_bytes
        if verb.kind is OpKind.DISPATCH:
            sent = tuple(number * row_bytes for number in rows.sent)
            sent_back = tuple(number * grad_row_bytes for number in rows.returned)
        else:
            sent = tuple(number * model.combine_row_bytes for number in rows.returned)
            sent_back = tuple(number * model.combine_grad_row_bytes for number in rows.sent)
        alone, queued = self.costs.message_ms, self.costs.queued_ms
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


def _slot(message: OpKind, chunk: int) -> int:
    return 2 * chunk + (message is OpKind.COMBINE)


def _takes_time(action: Action) -> bool:
    return any(action.forward_ms + action.backward_ms) or any(action.weight_grads)


_MIRRORED = {_CODES[verb]: _CODES[mirrored] for verb, mirrored in MIRRORED.items()}


def backward(steps: Sequence[Step]) -> list[Step]:
    """The backward order of a forward order: its mirror."""
    return [(_MIRRORED[code], layer, action) for code, layer, action in reversed(steps) if code in _MIRRORED]
