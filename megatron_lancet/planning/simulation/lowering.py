"""The order of a micro-batch's ops, exactly as the runtime runs them, with their costs.

Forward, chunks take turns. A turn lasts until one of the chunk's messages is on its way:

    turn 1   attention  route  [issue counts]  preprocess  [issue dispatch]  shared_experts
    turn 2   [wait dispatch]  experts  [issue combine]
    turn 3   [wait combine]  postprocess, then turn 1 of the next layer

Backward, autograd runs nodes in the reverse order of their creation: the same list from its end, where a wait issues
the gradient's message and an issue waits for it. There are no counts then.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from megatron_lancet.files import RecordError
from megatron_lancet.planning.profile import ChunkRouting, LayerKind, ModelFacts, Profile
from megatron_lancet.planning.simulation.cost_model import CostModel, DwCost
from megatron_lancet.schedule.ops import OpKind, Phase
from megatron_lancet.schedule.plan import ChunkDim, OverlapRange, Segment

COMPUTE, COUNTS, ISSUE, WAIT = range(4)
_EVEN = 1e-9
_MAX_RANKS_WITH_ROUTING = 8
"""More ranks are told apart by their shares only, so that simulations stay quick."""


@dataclass(frozen=True, eq=False, slots=True)
class Action:
    """One thing that a chunk does in a layer, with its costs on each simulated rank.

    Attributes:
        code: compute, counts, issue or wait, forward.
        kind: of the op.
        chunk: index of the chunk.
        forward_ms: of the compute op or of the message.
        backward_ms: the same in the backward.
        forward_bytes: of the message, sent to others.
        backward_bytes: the same in the backward.
        forward_queued_ms: of a message that leaves behind another: by which it comes after that.
        backward_queued_ms: the same in the backward.
        weight_grads: that become ready in the backward.
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
"""Code, global layer number (0 beside the layers) and action."""


@dataclass(frozen=True)
class Loads:
    """Who receives how much. Ranks that receive the same behave the same, so one stands for all of them.

    Attributes:
        shares: of the group's routed rows that each rank receives.
        routing: rows of single chunks, by layer, dimension, chunk count and chunk; the shares hold where there is none.
    """

    shares: tuple[float, ...]
    routing: Mapping[tuple[int, ChunkDim, int, int], ChunkRouting] = field(default_factory=dict)

    @staticmethod
    def of(model: ModelFacts, shares: Sequence[float] | None) -> "Loads":
        """Checked and normalised.

        Raises:
            RecordError: there is not one share per rank of the group, or they can't be shares.
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
        """As a profile saw them, chunk by chunk if the group is small: then every rank is simulated."""
        loads = Loads.of(profile.model, profile.received_share)
        if profile.model.ep_size > _MAX_RANKS_WITH_ROUTING:
            return loads
        return Loads(
            loads.shares,
            {(one.layer, one.chunk_dim, one.num_chunks, one.chunk): one for one in profile.routing},
        )

    @cached_property
    def simulated(self) -> tuple[int, ...]:
        """The ranks that are simulated: the first of each distinct share."""
        if self.routing:
            return tuple(range(len(self.shares)))
        ranks: list[int] = []
        for rank, share in enumerate(self.shares):
            if all(abs(share - self.shares[other]) > _EVEN for other in ranks):
                ranks.append(rank)
        return tuple(ranks)

    @cached_property
    def same_ranks(self) -> tuple[int, ...]:
        """How many ranks each simulated one stands for, itself included."""
        if self.routing:
            return (1,) * len(self.shares)
        return tuple(sum(abs(share - self.shares[rank]) <= _EVEN for share in self.shares) for rank in self.simulated)


class _Rows(NamedTuple):
    """Rows of a chunk in a layer, by simulated rank.

    Attributes:
        received: that its experts get.
        sent: that it sends to others.
        returned: that it sends back to others.
    """

    received: Sequence[float]
    sent: Sequence[int]
    returned: Sequence[int]


class Lowering:
    """Makes the order of ops of segments; what a chunk does in a layer of a kind is made once."""

    def __init__(self, costs: CostModel, loads: Loads) -> None:
        self.costs = costs
        self.loads = loads
        self._shares = [loads.shares[rank] for rank in loads.simulated]
        self._cache: dict[tuple[object, ...], list[Action]] = {}

    def forward(self, layers: Sequence[tuple[int, LayerKind]], segment: Segment) -> list[Step]:
        """Forward order of the ops of a segment's layers.

        Args:
            layers: global number and kind of each.
        """
        if segment.num_chunks == 1 or segment.range is OverlapRange.STACK:
            return self._in_chunks(layers, segment, with_attention=True)
        steps: list[Step] = []
        for number, kind in layers:
            if segment.range is OverlapRange.LAYER:
                steps += self._in_chunks([(number, kind)], segment, with_attention=True)
            else:
                steps += self._around_experts(number, kind, segment)
        return steps

    def beside(self, kind: str) -> list[Step]:
        """Embedding or head, on the whole micro-batch."""
        action = self._compute(LayerKind.NONE, kind, ChunkDim.BATCH, 1, 0)
        empty = not any(action.forward_ms + action.backward_ms) and not any(action.weight_grads)
        return [] if empty else [(COMPUTE, 0, action)]

    def _around_experts(self, number: int, kind: LayerKind, segment: Segment) -> list[Step]:
        """A layer on the whole micro-batch, of which only the experts may run in chunks."""
        whole = [OpKind.ATTENTION, OpKind.MLP]
        if kind is LayerKind.MOE:
            whole = [OpKind.ATTENTION, OpKind.ROUTE] if segment.range is OverlapRange.EXPERTS else [OpKind.ATTENTION]
        key = ("whole", kind, *whole)
        if key not in self._cache:
            self._cache[key] = [self._compute(kind, op, ChunkDim.BATCH, 1, 0) for op in whole]
        steps = [(action.code, number, action) for action in self._cache[key]]
        return steps + (self._in_chunks([(number, kind)], segment, False) if kind is LayerKind.MOE else [])

    def _in_chunks(self, layers: Sequence[tuple[int, LayerKind]], segment: Segment, with_attention: bool) -> list[Step]:
        """Cut, let the chunks take turns, put together."""
        ways = []
        for chunk in range(segment.num_chunks):
            turns: list[list[Step]] = [[]]
            for number, kind in layers:
                parts = self._turns(number, kind, segment, chunk, with_attention)
                turns[-1] += [(action.code, number, action) for action in parts[0]]
                turns += [[(action.code, number, action) for action in part] for part in parts[1:]]
            ways.append(turns)
        steps = [step for turn in zip(*ways, strict=True) for part in turn for step in part]
        if segment.num_chunks > 1:
            steps += self._cut(segment)
        return steps

    def _cut(self, segment: Segment) -> list[Step]:
        key = (OpKind.CUT, segment.chunk_dim, segment.num_chunks)
        if key not in self._cache:
            action = self._compute(LayerKind.NONE, OpKind.CUT, segment.chunk_dim, segment.num_chunks, 0, whole=True)
            self._cache[key] = [action] if any(action.forward_ms + action.backward_ms) else []
        return [(action.code, 0, action) for action in self._cache[key]]

    def _turns(
        self, number: int, kind: LayerKind, segment: Segment, chunk: int, with_attention: bool
    ) -> list[list[Action]]:
        """What a chunk does in a layer, by its turns; the first goes on from the layer before."""
        dim, num_chunks = segment.chunk_dim, segment.num_chunks
        has_gate = segment.range is not OverlapRange.EXPERTS or num_chunks == 1
        routing = self.loads.routing.get((number, dim if num_chunks > 1 else ChunkDim.BATCH, num_chunks, chunk))
        layer = number if routing is not None else None
        key = (kind, dim if num_chunks > 1 else None, num_chunks, chunk, with_attention, has_gate, layer)
        flat = self._cache.get(key)
        if flat is None:
            rows = self._rows(dim, num_chunks, chunk, routing)
            flat = self._cache[key] = self._way(kind, dim, num_chunks, chunk, with_attention, has_gate, rows)
        cuts = [0, *(i for i, action in enumerate(flat) if action.code == WAIT), len(flat)]
        return [flat[start:end] for start, end in pairwise(cuts)]

    def _rows(self, dim: ChunkDim, num_chunks: int, chunk: int, routing: ChunkRouting | None) -> "_Rows":
        """A rank keeps the rows that go from itself to itself."""
        own = self.costs.chunk_units(dim, num_chunks)[chunk] * self.costs.model.topk
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

    def _way(
        self,
        kind: LayerKind,
        dim: ChunkDim,
        num_chunks: int,
        chunk: int,
        with_attention: bool,
        has_gate: bool,
        rows: "_Rows",
    ) -> list[Action]:
        def compute(op: str) -> Action:
            return self._compute(kind, op, dim, num_chunks, chunk, received=rows.received)

        if kind is LayerKind.DENSE:
            return [compute(OpKind.ATTENTION), compute(OpKind.MLP)]
        dispatch, combine = (self._message(op, chunk, rows) for op in (OpKind.DISPATCH, OpKind.COMBINE))
        way = [compute(OpKind.ATTENTION)] if with_attention else []
        way += [compute(OpKind.ROUTE)] if has_gate else []
        counts = Action(COUNTS, OpKind.COUNTS, chunk, (), (), slot=dispatch[0].slot)
        way += [counts, compute(OpKind.PREPROCESS), dispatch[0]]
        if self.costs.model.has_shared_experts:
            way.append(compute(OpKind.SHARED_EXPERTS))
        return [*way, dispatch[1], compute(OpKind.EXPERTS), combine[0], combine[1], compute(OpKind.POSTPROCESS)]

    def _compute(
        self,
        kind: LayerKind,
        op: str,
        dim: ChunkDim,
        num_chunks: int,
        chunk: int,
        whole: bool = False,
        received: Sequence[float] = (),
    ) -> Action:
        """
        Args:
            whole: the op works on the whole micro-batch, although it is cut.
            received: rows of the experts, by simulated rank.
        """
        costs = self.costs
        units = costs.chunk_units(dim, num_chunks)
        tokens = float(sum(units) if whole else units[chunk])
        all_rows = received if op == OpKind.EXPERTS else [tokens] * len(self._shares)
        return Action(
            COMPUTE,
            op,
            chunk,
            tuple(costs.op_ms(kind, op, Phase.FORWARD, dim, num_chunks, chunk, rows) for rows in all_rows),
            tuple(costs.op_ms(kind, op, Phase.INPUT_GRAD, dim, num_chunks, chunk, rows) for rows in all_rows),
            weight_grads=tuple(costs.weight_grads(kind, op, num_chunks, rows) for rows in all_rows),
        )

    def _message(self, op: str, chunk: int, rows: "_Rows") -> tuple[Action, Action]:
        """Issue and wait. The gradient goes the other way."""
        model = self.costs.model
        if op == OpKind.DISPATCH:
            sent = tuple(number * model.row_bytes for number in rows.sent)
            sent_back = tuple(number * model.grad_row_bytes for number in rows.returned)
        else:
            sent = tuple(number * model.combine_row_bytes for number in rows.returned)
            sent_back = tuple(number * model.combine_grad_row_bytes for number in rows.sent)
        slot = 2 * chunk + (op == OpKind.COMBINE)
        alone, queued = self.costs.message_ms, self.costs.queued_ms
        issue, wait = (
            Action(
                code,
                op,
                chunk,
                self._message_ms(alone, sent),
                self._message_ms(alone, sent_back),
                sent,
                sent_back,
                forward_queued_ms=self._message_ms(queued, sent),
                backward_queued_ms=self._message_ms(queued, sent_back),
                slot=slot,
            )
            for code in (ISSUE, WAIT)
        )
        return issue, wait

    def _message_ms(self, one_ms: Callable[[float], float], num_bytes: tuple[int, ...]) -> tuple[float, ...]:
        if self.costs.profile.link.sends_share_link:
            return tuple(one_ms(number) for number in num_bytes)
        return (one_ms(max(num_bytes)),) * len(num_bytes)


_MIRRORED = {COMPUTE: COMPUTE, ISSUE: WAIT, WAIT: ISSUE}


def backward(steps: Sequence[Step]) -> list[Step]:
    """The backward order of a forward order: its mirror, without counts."""
    return [(_MIRRORED[code], layer, action) for code, layer, action in reversed(steps) if code != COUNTS]
