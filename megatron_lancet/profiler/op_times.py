"""From the spans of traced steps to the median time of each op and of each weight gradient."""

import statistics
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron_lancet.planning.profile import LayerKind, ModelFacts, OpTime, WeightGradTime
from megatron_lancet.runtime.trace import StepTrace
from megatron_lancet.schedule.ops import Op, OpKind, Phase
from megatron_lancet.schedule.plan import ChunkDim, OverlapRange, Plan
from megatron_lancet.schedule.timeline import Lane, Span

_READY_AFTER = (
    ("self_attention.", OpKind.ATTENTION),
    ("mlp.experts.", OpKind.EXPERTS),
    ("mlp.shared_experts.", OpKind.SHARED_EXPERTS),
    ("mlp.router", OpKind.ROUTE),
    ("mlp.", OpKind.MLP),
)
"""The op in whose backward a weight's gradient becomes ready, by the beginning of its name; the first match counts."""


class OpKey(NamedTuple):
    """Which op of which chunk; see :class:`OpTime`."""

    layer_kind: LayerKind
    kind: str
    phase: Phase
    chunk_dim: ChunkDim
    num_chunks: int
    chunk: int


class DwKey(NamedTuple):
    """Which weight gradient; see :class:`WeightGradTime`."""

    layer_kind: LayerKind
    name: str
    num_chunks: int


class Took(NamedTuple):
    """What an op took.

    Attributes:
        beside_ms: part of it in which messages were in flight.
    """

    ms: float
    beside_ms: float

    def alone_ms(self, slowdown: float) -> float:
        """What it would have taken without messages, if they make compute slower by a factor."""
        return self.ms - self.beside_ms * (1 - 1 / slowdown)


StepOps = dict[tuple[int, OpKey], list[Took]]
"""Times of a step's ops in its micro-batches, without weight gradients; by layer (0 beside layers) and op."""


@dataclass
class Samples:
    """What one rank measured, over steps, layers and micro-batches.

    Attributes:
        ops: times of each op.
        received: rows that ``experts`` got, by its key.
        weight_grads: times of each weight gradient.
        pinned_bytes: of each weight gradient.
        weight_bytes: of each weight gradient.
        rest_ms: per step, what is neither a pass nor a wait in one.
        steps: each by itself.
    """

    ops: dict[OpKey, list[Took]] = field(default_factory=lambda: defaultdict(list))
    received: dict[OpKey, list[int]] = field(default_factory=lambda: defaultdict(list))
    weight_grads: dict[DwKey, list[Took]] = field(default_factory=lambda: defaultdict(list))
    pinned_bytes: dict[DwKey, list[int]] = field(default_factory=lambda: defaultdict(list))
    weight_bytes: dict[DwKey, int] = field(default_factory=dict)
    rest_ms: list[float] = field(default_factory=list)
    steps: list[StepOps] = field(default_factory=list)

    def add(self, step: StepTrace, plan: Plan, model: ModelFacts) -> None:
        """Count in a step that ran under ``plan``."""
        by_name: defaultdict[str, list[Took]] = defaultdict(list)
        beside = _Busy(span for span in step.timeline.spans if span.lane is Lane.COMM)
        for span in step.timeline.spans:
            if span.lane is Lane.COMPUTE:
                by_name[span.name].append(Took(span.ms, beside.within_ms(span)))
        own: StepOps = {}
        for name, parts in by_name.items():
            op = Op.parse(name)
            if op.phase is Phase.WEIGHT_GRAD:
                self.weight_grads[_dw_key(op, plan, model)] += parts
                continue
            key, place = op_key(op, plan, model), op.layer or 0
            own[place, key] = _per_micro_batch(parts, model.num_micro_batches)
            self.ops[key] += own[place, key]
        self.steps.append(own)
        for name, rows in step.received_rows.items():
            self.received[op_key(Op.parse(name), plan, model)] += rows
        for name, facts in step.weight_grads.items():
            dw_key = _dw_key(Op.parse(name), plan, model)
            self.pinned_bytes[dw_key] += facts.pinned_bytes
            self.weight_bytes[dw_key] = facts.weight_bytes
        busy_ms = sum(span.ms for span in step.timeline.spans if span.lane is not Lane.COMM)
        self.rest_ms.append(step.timeline.step_ms - busy_ms)

    def medians(self, slowdown: float = 1.0) -> "Figures":
        """One number for each list; times as they would be without messages in flight.

        Args:
            slowdown: by which messages in flight make compute slower.
        """

        def alone_ms(times: Sequence[Took]) -> float:
            return statistics.median(took.alone_ms(slowdown) for took in times)

        return Figures(
            {key: alone_ms(times) for key, times in self.ops.items()},
            {key: statistics.median(values) for key, values in self.received.items()},
            {key: alone_ms(times) for key, times in self.weight_grads.items()},
            {key: statistics.median(values) for key, values in self.pinned_bytes.items()},
            dict(self.weight_bytes),
            statistics.median(self.rest_ms),
        )


@dataclass(frozen=True)
class Figures:
    """Medians of one rank, or over ranks; see :class:`Samples`."""

    op_ms: Mapping[OpKey, float]
    received: Mapping[OpKey, float]
    dw_ms: Mapping[DwKey, float]
    pinned_bytes: Mapping[DwKey, float]
    weight_bytes: Mapping[DwKey, int]
    rest_ms: float


def over_ranks(ranks: Sequence[Figures]) -> Figures:
    """Medians over the ranks that have the op: with pipeline stages not all have all layers."""
    return Figures(
        _medians(rank.op_ms for rank in ranks),
        _medians(rank.received for rank in ranks),
        _medians(rank.dw_ms for rank in ranks),
        _medians(rank.pinned_bytes for rank in ranks),
        {key: num_bytes for rank in ranks for key, num_bytes in rank.weight_bytes.items()},
        statistics.median(rank.rest_ms for rank in ranks),
    )


def _medians[Key](ranks: Iterable[Mapping[Key, float]]) -> dict[Key, float]:
    values: defaultdict[Key, list[float]] = defaultdict(list)
    for rank in ranks:
        for key, value in rank.items():
            values[key].append(value)
    return {key: statistics.median(found) for key, found in values.items()}


def op_times(figures: Figures, model: ModelFacts) -> tuple[OpTime, ...]:
    """The ops of a profile, in a fixed order."""
    return tuple(
        OpTime(**key._asdict(), rows=_rows(key, figures, model), ms=round(ms, 5))
        for key, ms in sorted(figures.op_ms.items())
    )


def weight_grad_times(figures: Figures, model: ModelFacts) -> tuple[WeightGradTime, ...]:
    """The weight gradients of a profile, in the order in which a backward pass makes them ready within a layer."""
    times = []
    for key, ms in sorted(figures.dw_ms.items(), key=lambda item: (item[0].layer_kind, item[0].num_chunks)):
        after = ready_after(key)
        tokens = model.micro_batch_size * model.seq_length / key.num_chunks
        received = [rows for op, rows in figures.received.items() if op.num_chunks == key.num_chunks]
        rows = statistics.fmean(received) if after == OpKind.EXPERTS and received else tokens
        times.append(
            WeightGradTime(
                layer_kind=key.layer_kind,
                name=key.name,
                num_chunks=key.num_chunks,
                rows=round(rows),
                ms=round(ms, 5),
                pinned_bytes=round(figures.pinned_bytes[key]),
                weight_bytes=figures.weight_bytes[key],
                after=after,
            )
        )
    return tuple(times)


def ready_after(key: DwKey) -> str:
    """The compute op in whose backward a weight gradient becomes ready."""
    if key.layer_kind is LayerKind.NONE:
        return OpKind.HEAD
    return next(kind for start, kind in _READY_AFTER if key.name.startswith(start))


def op_key(op: Op, plan: Plan, model: ModelFacts) -> OpKey:
    """What the span of a compute op is a sample of."""
    assert op.phase is not Phase.WEIGHT_GRAD, op
    if op.layer is not None:
        assert op.chunk is not None, op
        dim, num_chunks = _cut_of(plan, op.layer, op.kind)
        return OpKey(model.layer_kinds[op.layer - 1], op.kind, op.phase, dim, num_chunks, op.chunk)
    dim, num_chunks = ChunkDim.BATCH, 1
    if op.kind == OpKind.CUT:
        most = max(plan.segments, key=lambda segment: segment.num_chunks)
        dim, num_chunks = most.chunk_dim, most.num_chunks
    return OpKey(LayerKind.NONE, op.kind, op.phase, dim, num_chunks, 0)


def _dw_key(op: Op, plan: Plan, model: ModelFacts) -> DwKey:
    if op.layer is None:
        return DwKey(LayerKind.NONE, op.kind, 1)
    layer_kind = model.layer_kinds[op.layer - 1]
    _, num_chunks = _cut_of(plan, op.layer, ready_after(DwKey(layer_kind, op.kind, 1)))
    return DwKey(layer_kind, op.kind, num_chunks)


def _cut_of(plan: Plan, layer: int, kind: str) -> tuple[ChunkDim, int]:
    """How an op of a layer is cut: narrow ranges leave attention, or the gate too, whole."""
    segment = plan.segment_of(layer)
    whole = kind in (OpKind.ATTENTION, OpKind.MLP) or (kind == OpKind.ROUTE and segment.range is OverlapRange.EXPERTS)
    if segment.num_chunks == 1 or (whole and not segment.range.has_attention):
        return ChunkDim.BATCH, 1
    return segment.chunk_dim, segment.num_chunks


def _rows(key: OpKey, figures: Figures, model: ModelFacts) -> int:
    if key.kind == OpKind.EXPERTS:
        # Received once, forward.
        return round(figures.received[key._replace(phase=Phase.FORWARD)])
    if key.layer_kind is LayerKind.NONE:
        return model.micro_batch_size * model.seq_length
    size, other = model.micro_batch_size, model.seq_length
    if key.chunk_dim is ChunkDim.SEQUENCE:
        size, other = other, size
    base, rest = divmod(size, key.num_chunks)
    return (base + (key.chunk < rest)) * other


class _Busy:
    """When messages were in flight."""

    def __init__(self, messages: Iterable[Span]) -> None:
        self._starts: list[float] = []
        self._ends: list[float] = []
        for message in sorted(messages, key=lambda span: span.start_ms):
            if self._ends and message.start_ms <= self._ends[-1]:
                self._ends[-1] = max(self._ends[-1], message.end_ms)
            else:
                self._starts.append(message.start_ms)
                self._ends.append(message.end_ms)

    def within_ms(self, span: Span) -> float:
        """For how long in ``span``."""
        first, last = bisect_left(self._ends, span.start_ms), bisect_left(self._starts, span.end_ms)
        return sum(
            min(self._ends[index], span.end_ms) - max(self._starts[index], span.start_ms)
            for index in range(first, last)
        )


def _per_micro_batch(times: Sequence[Took], num_micro_batches: int) -> list[Took]:
    """Time of an op in each micro-batch; a wait may have cut it into parts, or it may happen several times in each."""
    parts, left = divmod(len(times), num_micro_batches)
    if left:  # not alike in all of them: only the mean is known
        return [Took(*(sum(column) / num_micro_batches for column in zip(*times, strict=True)))]
    return [
        Took(*(sum(column) for column in zip(*times[start : start + parts], strict=True)))
        for start in range(0, len(times), parts)
    ]
