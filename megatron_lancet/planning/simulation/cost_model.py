"""Costs of ops, messages, weight gradients and activations, from a profile (Lancet section 5.3).

Values of measured chunk counts are used as they are. Values of other chunk counts are interpolated between the
measured ones of the same dimension, by the size of a chunk. A count of 1 belongs to both dimensions.

A dispatch other than plain is profiled with few chunk counts, often only with one. Its costs are the costs of the
plain dispatch, scaled by the ratio of both in the nearest chunk count that was measured with both.
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from itertools import chain
from statistics import fmean
from typing import NamedTuple

from megatron_lancet.files.reader import RecordError
from megatron_lancet.planning.profile import MemoryUse, ModelFacts, OpTime, Profile, WeightGradTime
from megatron_lancet.planning.simulation.curve import Curve
from megatron_lancet.schedule.chunk_sizes import chunk_sizes, most_chunks
from megatron_lancet.schedule.dispatch import PLAIN, Dispatch
from megatron_lancet.schedule.layers import LayerKind
from megatron_lancet.schedule.layout import Blocker
from megatron_lancet.schedule.ops import BETWEEN_NODES, INSIDE_NODE, OpKind, Phase
from megatron_lancet.schedule.plan import ChunkDim

_BESIDE_LAYERS = (OpKind.EMBEDDING, OpKind.HEAD, OpKind.CUT)
_NO_HOPS = (
    "the profile has no times of messages between nodes and inside a node; profile again, on several nodes or with "
    "--lancet-ranks-per-node"
)


class UnknownCost(RecordError):  # noqa: N818 - the name states the problem
    """The profile has no measurement from which a cost can be estimated."""


class DwCost(NamedTuple):
    """Cost of one weight gradient of one chunk.

    Attributes:
        name: name of the weight inside its layer.
        pinned_bytes: memory that stays alive while it is deferred.
        layers_back: distance from the layer of the op to the layer that owns the weight: a repeated layer's first.
        host_ms: time in which the host launches it.
    """

    name: str
    ms: float
    pinned_bytes: int
    layers_back: int = 0
    host_ms: float = 0.0


class _WireTimes(NamedTuple):
    """Times of messages over one wire, by bytes that a rank sends: of a message alone, and behind another one."""

    alone: Curve
    queued: Curve

    @staticmethod
    def of(alone: Sequence[tuple[int, float]], queued: Sequence[tuple[int, float]]) -> "_WireTimes | None":
        """The curves through measured points; None without any."""
        if not alone:
            return None
        curve = Curve(alone, flat_below=True)
        return _WireTimes(curve, Curve(queued, flat_below=True) if queued else curve)


class CostModel:
    """Costs by layer kind, op kind, phase, chunk dimension, chunk count, chunk and rows."""

    def __init__(self, profile: Profile) -> None:
        """
        Raises:
            UnknownCost: the profile has no all-to-all times although its experts are on several ranks.
        """
        self.profile = profile
        self.model: ModelFacts = profile.model
        self._ops: dict[tuple[LayerKind, str, Phase], list[OpTime]] = defaultdict(list)
        self._tiled: dict[tuple[LayerKind, str, Phase], list[OpTime]] = defaultdict(list)
        for op in profile.ops:
            (self._tiled if op.tiles else self._ops)[op.layer_kind, op.kind, op.phase].append(op)
        self._dws: dict[tuple[LayerKind, str], list[WeightGradTime]] = defaultdict(list)
        for dw in profile.weight_grads:
            self._dws[dw.layer_kind, dw.after].append(dw)
        self._memory: dict[LayerKind, list[MemoryUse]] = defaultdict(list)
        for use in profile.memory:
            self._memory[use.layer_kind].append(use)
        if profile.model.ep_size > 1 and not profile.link.all_to_all:
            raise UnknownCost("the profile has no all-to-all times; profile the link too")
        link = profile.link
        self._wires = dict.fromkeys(OpKind, _WireTimes.of(link.all_to_all, link.queued))
        self._wires |= dict.fromkeys(BETWEEN_NODES, _WireTimes.of(link.between_nodes, link.between_nodes_queued))
        self._wires |= dict.fromkeys(INSIDE_NODE, _WireTimes.of(link.inside_node, link.inside_node_queued))
        self._all_reduce = Curve(profile.link.all_reduce, flat_below=True) if profile.link.all_reduce else None
        self._gradients = {(dw.layer_kind, dw.name): (dw.after, dw.weight_bytes) for dw in profile.weight_grads}
        self.op_ms = cache(self._op_ms)
        self.weight_grads = cache(self._weight_grads)
        self.saved_bytes = cache(self._saved_bytes)

    @property
    def knows_memory(self) -> bool:
        """Whether the profile has the memory use of layers."""
        return bool(self._memory)

    def chunk_tokens(self, dim: ChunkDim, num_chunks: int, multiple: int) -> list[int]:
        """Sizes of the chunks of a micro-batch in tokens, larger ones first.

        Args:
            multiple: sizes along ``dim`` are multiples of this number of samples or positions.
        """
        size, tokens_per_unit = self.model.size_along(dim)
        return [part * tokens_per_unit for part in chunk_sizes(size, num_chunks, multiple)]

    def can_cut(self, dim: ChunkDim, num_chunks: int, multiple: int) -> bool:
        """Whether a micro-batch is long enough along ``dim``; see :meth:`chunk_tokens`."""
        return num_chunks == 1 or num_chunks <= most_chunks(self.model.size_along(dim)[0], multiple)

    def profiled_chunk_counts(self, dim: ChunkDim) -> tuple[int, ...]:
        """Chunk counts at which layers' ops were measured along ``dim``, ascending."""
        counts = {
            op.num_chunks
            for op in chain.from_iterable(self._ops.values())
            if op.layer_kind is not LayerKind.NONE and (op.chunk_dim is dim or op.num_chunks == 1) and _is_plain(op)
        }
        return tuple(sorted(counts))

    @property
    def knows_tiles(self) -> bool:
        """Whether a plan with tiles was profiled."""
        return bool(self._tiled)

    def measured_in_tiles(self, layer_kind: LayerKind, kind: str, phase: Phase) -> Sequence[OpTime]:
        """Times of an op that were measured with tiles."""
        return self._tiled.get((layer_kind, kind, phase), ())

    def blocker(self, dispatch: Dispatch) -> Blocker | None:
        """Why plans with a dispatch can't be simulated; None if they can."""
        blocker = dispatch.blocker(self.model.layout)
        if blocker is None and self.model.ep_size > 1 and any(self._wires[kind] is None for kind in dispatch.sent):
            return Blocker(_NO_HOPS)
        return blocker

    def possible_dispatches(self) -> list[Dispatch]:
        """The dispatches whose plans can be simulated."""
        return [one for one in Dispatch.known().values() if self.blocker(one) is None]

    def message_ms(self, num_bytes: float, kind: OpKind = OpKind.DISPATCH) -> float:
        """Time from launch to arrival of ``num_bytes`` that a rank sends to others; 0 without expert parallelism.

        Args:
            kind: kind of the message, which says whether it goes to all ranks of the group, between nodes or inside a
                node.

        Raises:
            UnknownCost: the profile has no times of messages that go so far.
        """
        return 0.0 if self.model.ep_size == 1 else self._wire_of(kind).alone.at(num_bytes)

    def queued_ms(self, num_bytes: float, kind: OpKind = OpKind.DISPATCH) -> float:
        """Time by which a message arrives after the previous one of its wire if it is queued behind that.

        Args and errors as in :meth:`message_ms`.
        """
        return 0.0 if self.model.ep_size == 1 else self._wire_of(kind).queued.at(num_bytes)

    def _wire_of(self, kind: OpKind) -> "_WireTimes":
        found = self._wires[kind]
        if found is None:
            raise UnknownCost(_NO_HOPS)
        return found

    def is_profiled(self, layer_kind: LayerKind, kind: OpKind) -> bool:
        """Whether the profile has times of an op in layers of a kind."""
        return (layer_kind, kind, Phase.FORWARD) in self._ops

    def gradient(self, layer: int, name: str) -> tuple[str, int]:
        """The op in whose backward a weight's gradient becomes ready, and the gradient's bytes on a rank.

        Args:
            layer: global layer number; 0 outside the layers.
        """
        layer_kind = self.model.layer_kinds[layer - 1] if layer else LayerKind.NONE
        return self._gradients.get((layer_kind, name)) or self._gradients[LayerKind.MTP, name]

    def reduction_ms(self, num_bytes: float, num_ranks: int) -> float:
        """Time to reduce gradients of ``num_bytes`` over ``num_ranks`` ranks without other messages on the link.

        Raises:
            UnknownCost: the profile has no all-reduce times.
        """
        rules = self.profile.gradients
        assert rules is not None
        if num_ranks == 1:
            return 0.0
        if self._all_reduce is None or rules.dense_ranks == 1:
            raise UnknownCost("the profile has no all-reduce times; profile a run with several data-parallel ranks")
        return rules.ring_factor(num_ranks) * self._all_reduce.at(num_bytes)

    @property
    def counts_ms(self) -> float:
        """Time of one exchange of token counts."""
        return 0.0 if self.model.ep_size == 1 else self.profile.link.counts_ms

    def _op_ms(
        self,
        layer_kind: LayerKind,
        kind: str,
        phase: Phase,
        dim: ChunkDim,
        num_chunks: int,
        chunk: int,
        rows: float,
        dispatch: Dispatch = PLAIN,
    ) -> float:
        """Time of one op of one chunk, without weight gradients.

        Args:
            rows: received rows for ``experts``, or the rows of a part of them; tokens of the chunk for other ops.
            dispatch: what all-to-alls carry, without tiles; makes a difference to ops that make, or sum, their rows.

        Raises:
            UnknownCost: nothing of this kind, phase and dimension was profiled.
        """
        own = _with_dispatch(self._ops.get((layer_kind, kind, phase), ()), dispatch, dim, num_chunks)
        similar = self._ops.get((layer_kind, _similar(kind, dispatch), phase), ())
        plain = [op for op in similar if _is_plain(op) and _fits(op, dim, num_chunks)]
        found = plain or own
        if not found and layer_kind is LayerKind.NONE and kind in _BESIDE_LAYERS:
            return 0.0  # a middle pipeline stage has neither embedding nor head
        if not found:
            raise UnknownCost(
                f"the profile has no time of {kind!r} ({layer_kind} layer, phase {phase}, chunks along {dim}); "
                "profile the model with such chunks, or plan without them"
            )
        return _time_ms(found, kind, num_chunks, chunk, rows) * _ratio(own, plain, num_chunks)

    def op_host_ms(
        self, layer_kind: LayerKind, kind: str, phase: Phase, dim: ChunkDim, num_chunks: int, chunk: int
    ) -> float:
        """Time in which the host launches one op of one chunk, which rows don't change: as in the nearest measurement.

        It is 0 where none was measured.
        """
        key, place = (layer_kind, kind, phase), (chunk + 0.5) / num_chunks

        def distance(op: OpTime) -> tuple[bool, int, float]:
            return (
                not _fits(op, dim, num_chunks),
                abs(op.num_chunks - num_chunks),
                abs((op.chunk + 0.5) / op.num_chunks - place),
            )

        measured = [*self._ops.get(key, ()), *self._tiled.get(key, ())]
        return min(measured, key=distance).host_ms if measured else 0.0

    def _weight_grads(self, layer_kind: LayerKind, after: str, num_chunks: int, rows: float) -> tuple[DwCost, ...]:
        """Weight gradients that become ready in the backward of one chunk's op, in that order.

        The profile has an order for each measured chunk count, and they may differ: experts of a rank that run one
        after the other without chunks run layer by layer in chunks (``model/local_experts``).

        Args:
            after: the compute op.
            rows: received rows for ``experts``, tokens of the chunk for other ops.
        """

        def dissimilarity(dw: WeightGradTime) -> tuple[bool, int]:
            return (dw.num_chunks > 1) != (num_chunks > 1), abs(dw.num_chunks - num_chunks)

        costs = []
        found = self._dws.get((layer_kind, after), [])
        # Sorting keeps each chunk count's own order.
        for name in dict.fromkeys(dw.name for dw in sorted(found, key=dissimilarity)):
            times = [dw for dw in found if dw.name == name]
            used = [time for time in times if time.num_chunks == num_chunks] or times
            ms = Curve((time.rows, time.ms) for time in used).at(rows)
            pinned = Curve((time.rows, float(time.pinned_bytes)) for time in used).at(rows)
            costs.append(DwCost(name, ms, round(pinned), host_ms=fmean(time.host_ms for time in used)))
        return tuple(costs)

    def _saved_bytes(self, layer_kind: LayerKind, dim: ChunkDim, num_chunks: int, dispatch: Dispatch = PLAIN) -> int:
        """Bytes that one layer keeps of a micro-batch from forward to backward.

        They are linear in the count between profiled chunk counts of the same dimension. Beyond the largest, and if
        only other dimensions were measured, the nearest count is used. They are 0 if the profile has no memory use.

        Args:
            dispatch: what all-to-alls carry; makes a difference to layers with experts.

        Raises:
            UnknownCost: the profile has the memory use of other layers, but not of this kind.
        """
        uses = self._memory.get(layer_kind, [])
        if not uses and self._memory and layer_kind is not LayerKind.NONE:
            raise UnknownCost(f"the profile does not say what a {layer_kind} layer keeps; profile its memory too")
        if not uses:
            return 0
        own = _with_dispatch(uses, dispatch, dim, num_chunks)
        found = [use for use in uses if _is_plain(use)] or uses
        of_dim = [use for use in found if use.chunk_dim is dim or use.num_chunks == 1] or found
        counts = [use.num_chunks for use in of_dim]
        inside = min(max(num_chunks, min(counts)), max(counts))
        curve = Curve((use.num_chunks, float(use.saved_bytes)) for use in of_dim)
        return round(curve.at(inside) * _memory_ratio(own, of_dim, num_chunks))


def _similar(kind: str, dispatch: Dispatch) -> str:
    """The op of the plain dispatch that moves rows in the same way."""
    return dispatch.similar_ops.get(OpKind(kind), OpKind(kind))


def _is_plain(measured: OpTime | MemoryUse) -> bool:
    return measured.dispatch.is_plain


def _fits(measured: OpTime | MemoryUse, dim: ChunkDim, num_chunks: int) -> bool:
    """Whether a measurement is of chunks along ``dim``; an unchunked micro-batch belongs to both dimensions."""
    return measured.chunk_dim is dim or measured.num_chunks == 1 or num_chunks == 1


def _with_dispatch[Measured: (OpTime, MemoryUse)](
    measured: Sequence[Measured], dispatch: Dispatch, dim: ChunkDim, num_chunks: int
) -> list[Measured]:
    """The measurements that count for a dispatch and not for the plain one, maybe none."""
    fitting = [one for one in measured if _fits(one, dim, num_chunks)]
    by_dispatch = ([one for one in fitting if one.dispatch.name == nearest] for nearest in dispatch.measured_as)
    return next(filter(None, by_dispatch), [])


def _time_ms(found: Sequence[OpTime], kind: str, num_chunks: int, chunk: int, rows: float) -> float:
    """Time of an op of a chunk, from measurements of one dimension; see :meth:`CostModel.op_ms`."""
    exact = [op for op in found if op.num_chunks == num_chunks]
    place = (chunk + 0.5) / num_chunks
    if exact and kind != OpKind.EXPERTS:
        return _at_place(exact, place)
    by_count: dict[tuple[int, ChunkDim], list[OpTime]] = defaultdict(list)
    for op in found:
        by_count[op.num_chunks, op.chunk_dim].append(op)
    if kind == OpKind.EXPERTS:
        # Chunks of one count get about the same number of rows, so the cost of more rows shows between counts only.
        curve = Curve(_mean_point(ops) for ops in by_count.values())
        mean_rows, mean_ms = _mean_point(exact or found)
        at_mean_ms = curve.at(mean_rows)
        return curve.at(rows) * mean_ms / at_mean_ms if exact and at_mean_ms > 0 else curve.at(rows)
    points = [(sum(op.rows for op in ops) / len(ops), _at_place(ops, place)) for ops in by_count.values()]
    return Curve(points).at(rows)


def _ratio(own: Sequence[OpTime], plain: Sequence[OpTime], num_chunks: int) -> float:
    """Time of a row with a dispatch divided by that with the plain one, in the nearest chunk count measured with both.

    It is 1 if there is no such count.
    """
    count = _nearest_count(own, plain, num_chunks)
    if count is None:
        return 1.0
    rows, ms = _mean_point([op for op in own if op.num_chunks == count])
    plain_rows, plain_ms = _mean_point([op for op in plain if op.num_chunks == count])
    return ms * plain_rows / (rows * plain_ms) if rows > 0 and plain_ms > 0 else 1.0


def _memory_ratio(own: Sequence[MemoryUse], plain: Sequence[MemoryUse], num_chunks: int) -> float:
    """Like :func:`_ratio`, of the bytes that are kept."""
    count = _nearest_count(own, plain, num_chunks)
    if count is None:
        return 1.0
    kept, plain_kept = (fmean(use.saved_bytes for use in uses if use.num_chunks == count) for uses in (own, plain))
    return kept / plain_kept if plain_kept > 0 else 1.0


def _nearest_count(
    own: Sequence[OpTime] | Sequence[MemoryUse], plain: Sequence[OpTime] | Sequence[MemoryUse], num_chunks: int
) -> int | None:
    both = {one.num_chunks for one in own} & {one.num_chunks for one in plain}
    return min(both, key=lambda count: (abs(count - num_chunks), count), default=None)


def _mean_point(ops: Sequence[OpTime]) -> tuple[float, float]:
    """Mean rows and mean time."""
    return sum(op.rows for op in ops) / len(ops), sum(op.ms for op in ops) / len(ops)


def _at_place(ops: Sequence[OpTime], place: float) -> float:
    """Time at a relative place in the micro-batch, from 0 to 1, between the middles of its profiled chunks."""
    curve = Curve(((op.chunk + 0.5) / op.num_chunks, op.ms) for op in ops)
    first = min((op.chunk + 0.5) / op.num_chunks for op in ops)
    last = max((op.chunk + 0.5) / op.num_chunks for op in ops)
    return curve.at(min(max(place, first), last))
