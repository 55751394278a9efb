"""Costs of ops, messages, weight gradients and activations, from a profile (Lancet section 5.3).

Values of measured chunk counts are used as they are. Values of other chunk counts are interpolated between the
measured ones of the same dimension, by the size of a chunk. A count of 1 belongs to both dimensions.
"""

from collections import defaultdict
from functools import cache
from typing import NamedTuple

from megatron_lancet.files import RecordError
from megatron_lancet.planning.profile import MemoryUse, ModelFacts, OpTime, Profile, WeightGradTime
from megatron_lancet.planning.simulation.curve import Curve
from megatron_lancet.schedule.chunk_sizes import chunk_sizes, most_chunks
from megatron_lancet.schedule.layers import LayerKind
from megatron_lancet.schedule.ops import OpKind, Phase
from megatron_lancet.schedule.plan import ChunkDim

_BESIDE_LAYERS = (OpKind.EMBEDDING, OpKind.HEAD, OpKind.CUT)


class UnknownCost(RecordError):  # noqa: N818 - the name states the problem
    """The profile has no measurement from which a cost can be estimated."""


class DwCost(NamedTuple):
    """Cost of one weight gradient of one chunk.

    Attributes:
        name: name of the weight inside its layer.
        pinned_bytes: memory that stays alive while it is deferred.
        layers_back: distance from the layer of the op to the one that owns the weight: a repeated layer's first.
    """

    name: str
    ms: float
    pinned_bytes: int
    layers_back: int = 0


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
        for op in profile.ops:
            self._ops[op.layer_kind, op.kind, op.phase].append(op)
        self._dws: dict[tuple[LayerKind, str], list[WeightGradTime]] = defaultdict(list)
        for dw in profile.weight_grads:
            self._dws[dw.layer_kind, dw.after].append(dw)
        self._memory: dict[LayerKind, list[MemoryUse]] = defaultdict(list)
        for use in profile.memory:
            self._memory[use.layer_kind].append(use)
        if profile.model.ep_size > 1 and not profile.link.all_to_all:
            raise UnknownCost("the profile has no all-to-all times; profile the link too")
        self._message = Curve(profile.link.all_to_all, flat_below=True) if profile.link.all_to_all else None
        self._all_reduce = Curve(profile.link.all_reduce, flat_below=True) if profile.link.all_reduce else None
        self._gradients = {(dw.layer_kind, dw.name): (dw.after, dw.weight_bytes) for dw in profile.weight_grads}
        self._queued = Curve(profile.link.queued, flat_below=True) if profile.link.queued else self._message
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
            for op in self.profile.ops
            if op.layer_kind is not LayerKind.NONE and (op.chunk_dim is dim or op.num_chunks == 1)
        }
        return tuple(sorted(counts))

    def message_ms(self, num_bytes: float) -> float:
        """Time from launch to arrival of ``num_bytes`` that a rank sends to others; 0 without expert parallelism."""
        return 0.0 if self._message is None or self.model.ep_size == 1 else self._message.at(num_bytes)

    def queued_ms(self, num_bytes: float) -> float:
        """Time by which a message of ``num_bytes`` arrives after the previous one if it is queued behind that."""
        if self._queued is None or self.model.ep_size == 1:
            return 0.0
        return self._queued.at(num_bytes)

    def gradient(self, layer: int, name: str) -> tuple[str, int]:
        """The op in whose backward a weight's gradient becomes ready, and the gradient's bytes on a rank.

        Args:
            layer: global layer number; 0 beside the layers.
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
    ) -> float:
        """Time of one op of one chunk, without weight gradients.

        Args:
            rows: received rows for ``experts``, tokens of the chunk for other ops.

        Raises:
            UnknownCost: nothing of this kind, phase and dimension was profiled.
        """
        found = [
            op
            for op in self._ops.get((layer_kind, kind, phase), ())
            if op.chunk_dim is dim or op.num_chunks == 1 or num_chunks == 1
        ]
        if not found and layer_kind is LayerKind.NONE and kind in _BESIDE_LAYERS:
            return 0.0  # a middle pipeline stage has neither embedding nor head
        if not found:
            raise UnknownCost(
                f"the profile has no time of {kind!r} ({layer_kind} layer, phase {phase}, chunks along {dim}); "
                "profile the model with such chunks, or plan without them"
            )
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
            costs.append(DwCost(name, ms, round(pinned)))
        return tuple(costs)

    def _saved_bytes(self, layer_kind: LayerKind, dim: ChunkDim, num_chunks: int) -> int:
        """Bytes that one layer keeps of a micro-batch from forward to backward.

        They are linear in the count between profiled chunk counts of the same dimension. Beyond the largest, and if
        only other dimensions were measured, the nearest count is used. They are 0 if the profile has no memory use.

        Raises:
            UnknownCost: the profile has the memory use of other layers, but not of this kind.
        """
        uses = self._memory.get(layer_kind, [])
        if not uses and self._memory and layer_kind is not LayerKind.NONE:
            raise UnknownCost(f"the profile does not say what a {layer_kind} layer keeps; profile its memory too")
        if not uses:
            return 0
        of_dim = [use for use in uses if use.chunk_dim is dim or use.num_chunks == 1] or uses
        counts = [use.num_chunks for use in of_dim]
        inside = min(max(num_chunks, min(counts)), max(counts))
        curve = Curve((use.num_chunks, float(use.saved_bytes)) for use in of_dim)
        return round(curve.at(inside))


def _mean_point(ops: list[OpTime]) -> tuple[float, float]:
    """Mean rows and mean time."""
    return sum(op.rows for op in ops) / len(ops), sum(op.ms for op in ops) / len(ops)


def _at_place(ops: list[OpTime], place: float) -> float:
    """Time at a relative place in the micro-batch, from 0 to 1, between the middles of its profiled chunks."""
    curve = Curve(((op.chunk + 0.5) / op.num_chunks, op.ms) for op in ops)
    first = min((op.chunk + 0.5) / op.num_chunks for op in ops)
    last = max((op.chunk + 0.5) / op.num_chunks for op in ops)
    return curve.at(min(max(place, first), last))
