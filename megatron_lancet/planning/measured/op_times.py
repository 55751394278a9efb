"""Computes the median time of each op and of each weight gradient from the spans of traced steps."""

import statistics
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from megatron_lancet.planning.profile import ModelFacts, OpTime, WeightGradTime
from megatron_lancet.planning.verbs import is_cut
from megatron_lancet.schedule.chunk_sizes import chunk_sizes
from megatron_lancet.schedule.dispatch import PLAIN, Dispatch
from megatron_lancet.schedule.layers import LayerKind
from megatron_lancet.schedule.ops import Op, OpKind, Phase
from megatron_lancet.schedule.plan import ChunkDim, Plan
from megatron_lancet.schedule.timeline import Lane, RankTimeline, Span

_READY_AFTER = (
    ("eh_proj", OpKind.MTP_PROJECTION),
    ("self_attention.", OpKind.ATTENTION),
    ("mlp.experts.", OpKind.EXPERTS),
    ("mlp.shared_experts.", OpKind.SHARED_EXPERTS),
    ("mlp.router", OpKind.ROUTE),
    ("mlp.", OpKind.MLP),
)
"""The op in whose backward a weight's gradient becomes ready, by prefix of the name; the first match counts."""

_BY_DISPATCH = frozenset({OpKind.PREPROCESS, OpKind.NODE_ROWS, OpKind.EXPERTS, OpKind.NODE_SUMS, OpKind.POSTPROCESS})
"""Ops that make, expand or sum rows, so that their time depends on what all-to-alls carry."""
_BY_TILES = frozenset({OpKind.PREPROCESS, OpKind.OWN_EXPERTS, OpKind.EXPERTS, OpKind.POSTPROCESS})
"""Ops that work on the rows of a tile, or whose rows lie in another order with tiles."""


_BEHIND_HOST_MS = 0.02
"""A device that reaches a point by so little later than the host has nothing else to do there."""


class WeightGradSizes(Protocol):
    """Sizes of a weight gradient, like :class:`~megatron_lancet.runtime.trace.WeightGradFacts`."""

    @property
    def pinned_bytes(self) -> tuple[int, ...]:
        """Bytes that each dW of the step kept alive."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weight's gradient."""


class MeasuredStep(Protocol):
    """One step on one rank, like :class:`~megatron_lancet.runtime.trace.StepTrace`."""

    @property
    def timeline(self) -> RankTimeline:
        """The spans of the step."""

    @property
    def received_rows(self) -> Mapping[str, Sequence[int]]:
        """Rows that the experts received in each micro-batch, by op name."""

    @property
    def weight_grads(self) -> Mapping[str, WeightGradSizes]:
        """Sizes of the weight gradients, by name."""

    @property
    def host(self) -> Sequence[Span]:
        """The ops and weight gradients by the clock of a host that launches them; empty where the host computes."""


class OpKey(NamedTuple):
    """An op of a chunk; see :class:`OpTime`."""

    layer_kind: LayerKind
    kind: str
    phase: Phase
    chunk_dim: ChunkDim
    num_chunks: int
    chunk: int
    dispatch: Dispatch = PLAIN
    tiles: int = 0


class DwKey(NamedTuple):
    """A weight gradient; see :class:`WeightGradTime`."""

    layer_kind: LayerKind
    name: str
    num_chunks: int


class OpSample(NamedTuple):
    """Time of one op: ``ms``, of which ``overlapped_ms`` with messages in flight."""

    ms: float
    overlapped_ms: float

    def alone_ms(self, slowdown: float) -> float:
        """Returns the time without messages in flight, which slow compute down by the factor ``slowdown``."""
        return self.ms - self.overlapped_ms * (1 - 1 / slowdown)


StepOps = dict[tuple[int, OpKey], list[OpSample]]
"""Times of a step's ops in each micro-batch, without weight gradients; by layer (0 outside the layers) and op."""


@dataclass
class Samples:
    """Measurements of one rank, over steps, layers and micro-batches.

    Attributes:
        received: rows that the experts received, by their op.
        pinned_bytes: bytes that stay alive until the dW has run.
        weight_bytes: bytes of the gradient that the dW adds to.
        rest_ms: time of each step outside all spans, for example in the optimizer.
        outside_ms: time of each step before its first span and after its last one.
        steps: the samples in ``ops``, by step.
        host: times in which the host launches, of the same ops in each micro-batch.
        host_of_dws: the same for weight gradients.
    """

    ops: dict[OpKey, list[OpSample]] = field(default_factory=lambda: defaultdict(list))
    received: dict[OpKey, list[int]] = field(default_factory=lambda: defaultdict(list))
    weight_grads: dict[DwKey, list[OpSample]] = field(default_factory=lambda: defaultdict(list))
    pinned_bytes: dict[DwKey, list[int]] = field(default_factory=lambda: defaultdict(list))
    weight_bytes: dict[DwKey, int] = field(default_factory=dict)
    rest_ms: list[float] = field(default_factory=list)
    outside_ms: list[float] = field(default_factory=list)
    steps: list[StepOps] = field(default_factory=list)
    host: dict[OpKey, list[float]] = field(default_factory=lambda: defaultdict(list))
    host_of_dws: dict[DwKey, list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(
        self, step: MeasuredStep, plan: Plan, model: ModelFacts, message_ms: Callable[[Span], float] | None = None
    ) -> None:
        """Adds a step that ran under ``plan``.

        Args:
            message_ms: time that a message's bytes take once they move; None if it is in flight from its issue on. The
                rest of the time between its issue and its arrival it waits for other ranks or other messages.
        """
        by_name: defaultdict[str, list[OpSample]] = defaultdict(list)
        messages = _InFlight(step.timeline.spans, message_ms)
        for span in step.timeline.spans:
            if span.lane is Lane.COMPUTE:
                by_name[span.name].append(OpSample(span.ms, messages.within_ms(span)))
        own: StepOps = {}
        for name, parts in by_name.items():
            op = Op.parse(name)
            if op.phase is Phase.WEIGHT_GRAD:
                self.weight_grads[_dw_key(op, plan, model)] += parts
                continue
            key, place = op_key(op, plan, model), op.layer or 0
            samples = _per_micro_batch(parts, model.num_micro_batches)
            own.setdefault((place, key), []).extend(samples)
            self.ops[key] += samples
        self.steps.append(own)
        for name, rows in step.received_rows.items():
            self.received[op_key(Op.parse(name), plan, model)] += rows
        for name, facts in step.weight_grads.items():
            dw_key = _dw_key(Op.parse(name), plan, model)
            self.pinned_bytes[dw_key] += facts.pinned_bytes
            self.weight_bytes[dw_key] = facts.weight_bytes
        self._add_host(step.host, plan, model)
        spans = [span for span in step.timeline.spans if span.lane is not Lane.COMM]
        self.rest_ms.append(step.timeline.step_ms - sum(span.ms for span in spans))
        inside_ms = max(span.end_ms for span in spans) - spans[0].start_ms if spans else 0.0
        self.outside_ms.append(step.timeline.step_ms - inside_ms)

    def _add_host(self, host: Sequence[Span], plan: Plan, model: ModelFacts) -> None:
        for name, spans in _computed(host).items():
            op = Op.parse(name)
            if op.phase is Phase.WEIGHT_GRAD:
                self.host_of_dws[_dw_key(op, plan, model)] += [span.ms for span in spans]
            else:
                samples = _per_micro_batch([OpSample(span.ms, 0.0) for span in spans], model.num_micro_batches)
                self.host[op_key(op, plan, model)] += [sample.ms for sample in samples]

    def medians(self, slowdown: Callable[[str], float] = lambda kind: 1.0) -> "OpMedians":
        """Returns medians over all samples, with times corrected to those without messages in flight.

        Args:
            slowdown: factor by which messages in flight make ops of a kind slower; kinds of weight gradients are names.
        """

        def alone_ms(kind: str, times: Sequence[OpSample]) -> float:
            return statistics.median(sample.alone_ms(slowdown(kind)) for sample in times)

        return OpMedians(
            {key: alone_ms(key.kind, times) for key, times in self.ops.items()},
            {key: statistics.median(values) for key, values in self.received.items()},
            {key: alone_ms(key.name, times) for key, times in self.weight_grads.items()},
            {key: statistics.median(values) for key, values in self.pinned_bytes.items()},
            dict(self.weight_bytes),
            statistics.median(self.rest_ms),
            statistics.median(self.outside_ms),
            {key: statistics.median(times) for key, times in self.host.items()},
            {key: statistics.median(times) for key, times in self.host_of_dws.items()},
        )


@dataclass(frozen=True)
class OpMedians:
    """Medians of :class:`Samples`, of one rank or over ranks."""

    op_ms: Mapping[OpKey, float]
    received: Mapping[OpKey, float]
    dw_ms: Mapping[DwKey, float]
    pinned_bytes: Mapping[DwKey, float]
    weight_bytes: Mapping[DwKey, int]
    rest_ms: float
    outside_ms: float = 0.0
    host_ms: Mapping[OpKey, float] = field(default_factory=dict)
    dw_host_ms: Mapping[DwKey, float] = field(default_factory=dict)


def over_ranks(ranks: Sequence[OpMedians], stages: Sequence[int]) -> OpMedians:
    """Returns medians over the ranks that have the op: a pipeline stage has some of the layers.

    With several stages ``rest_ms`` is the time outside of the first stage, which starts and ends a step. All stages
    also wait while the pipeline fills and drains.

    Args:
        stages: pipeline stage of each rank.
    """
    first = [rank.outside_ms for rank, stage in zip(ranks, stages, strict=True) if stage == 0]
    return OpMedians(
        _medians(rank.op_ms for rank in ranks),
        _medians(rank.received for rank in ranks),
        _medians(rank.dw_ms for rank in ranks),
        _medians(rank.pinned_bytes for rank in ranks),
        {key: num_bytes for rank in ranks for key, num_bytes in rank.weight_bytes.items()},
        statistics.median(first if max(stages) else [rank.rest_ms for rank in ranks]),
        statistics.median(rank.outside_ms for rank in ranks),
        _medians(rank.host_ms for rank in ranks),
        _medians(rank.dw_host_ms for rank in ranks),
    )


def _medians[Key](ranks: Iterable[Mapping[Key, float]]) -> dict[Key, float]:
    values: defaultdict[Key, list[float]] = defaultdict(list)
    for rank in ranks:
        for key, value in rank.items():
            values[key].append(value)
    return {key: statistics.median(found) for key, found in values.items()}


def op_times(medians: OpMedians, model: ModelFacts) -> tuple[OpTime, ...]:
    """Returns the op times of a profile, in a fixed order."""
    return tuple(
        OpTime(
            **key._asdict(),
            rows=_rows(key, medians, model),
            ms=round(ms, 5),
            host_ms=round(medians.host_ms.get(key, 0.0), 5),
        )
        for key, ms in sorted(medians.op_ms.items())
    )


def weight_grad_times(medians: OpMedians, model: ModelFacts) -> tuple[WeightGradTime, ...]:
    """Returns the dW times of a profile, in the order in which a layer's backward pass makes them ready."""
    times = []
    for key, ms in sorted(medians.dw_ms.items(), key=lambda item: (item[0].layer_kind, item[0].num_chunks)):
        after = ready_after(key)
        tokens = model.micro_batch_size * model.seq_length / key.num_chunks
        whole = (op for op in medians.received if op.num_chunks == key.num_chunks and not op.tiles)
        received = [medians.received[op] for op in whole]
        rows = statistics.fmean(received) if after == OpKind.EXPERTS and received else tokens
        pinned, weight = round(medians.pinned_bytes[key]), medians.weight_bytes[key]
        times.append(
            WeightGradTime(
                *key,
                rows=round(rows),
                ms=round(ms, 5),
                pinned_bytes=pinned,
                weight_bytes=weight,
                after=after,
                host_ms=round(medians.dw_host_ms.get(key, 0.0), 5),
            )
        )
    return tuple(times)


def ready_after(key: DwKey) -> str:
    """Returns the compute op in whose backward a weight gradient becomes ready."""
    if key.layer_kind is LayerKind.NONE:
        return OpKind.HEAD
    return next(kind for start, kind in _READY_AFTER if key.name.startswith(start))


def op_key(op: Op, plan: Plan, model: ModelFacts) -> OpKey:
    """Returns the key that the span of a compute op counts for under ``plan``."""
    assert op.phase is not Phase.WEIGHT_GRAD, op
    if op.layer is not None:
        assert op.chunk is not None, op
        dim, num_chunks = _cut_of(plan, model, op.layer, op.kind)
        dispatch = plan.dispatch if op.kind in _BY_DISPATCH else PLAIN
        tiles = plan.segment_of(op.layer).tiles if op.kind in _BY_TILES else 0
        layer_kind = _layer_kind(op.layer, op.kind, model)
        return OpKey(layer_kind, op.kind, op.phase, dim, num_chunks, op.chunk, dispatch, tiles)
    dim, num_chunks = ChunkDim.BATCH, 1
    if op.kind == OpKind.CUT:
        most = max(plan.segments, key=lambda segment: segment.num_chunks)
        dim, num_chunks = most.chunk_dim, most.num_chunks
    return OpKey(LayerKind.NONE, op.kind, op.phase, dim, num_chunks, 0)


def _dw_key(op: Op, plan: Plan, model: ModelFacts) -> DwKey:
    if op.layer is None:
        return DwKey(LayerKind.NONE, op.kind, 1)
    after = ready_after(DwKey(model.layer_kinds[op.layer - 1], op.kind, 1))
    _, num_chunks = _cut_of(plan, model, op.layer, after)
    return DwKey(_layer_kind(op.layer, after, model), op.kind, num_chunks)


def _layer_kind(layer: int, kind: str, model: ModelFacts) -> LayerKind:
    """Returns the kind that an op's costs belong to."""
    return LayerKind.MTP if kind == OpKind.MTP_PROJECTION else model.layer_kinds[layer - 1]


def _cut_of(plan: Plan, model: ModelFacts, layer: int, kind: str) -> tuple[ChunkDim, int]:
    """Returns how an op of a layer is cut: narrow ranges do not cut attention, or also not the router."""
    segment = plan.segment_of(layer)
    if segment.num_chunks == 1 or not is_cut(model.layer_kinds[layer - 1], kind, segment.range):
        return ChunkDim.BATCH, 1
    return segment.chunk_dim, segment.num_chunks


def _rows(key: OpKey, medians: OpMedians, model: ModelFacts) -> int:
    if key.kind in (OpKind.OWN_EXPERTS, OpKind.EXPERTS):
        return round(medians.received[key._replace(phase=Phase.FORWARD)])
    if key.layer_kind is LayerKind.NONE:
        return model.micro_batch_size * model.seq_length
    size, tokens_per_unit = model.size_along(key.chunk_dim)
    return chunk_sizes(size, key.num_chunks, model.chunk_multiple(key.chunk_dim))[key.chunk] * tokens_per_unit


def launch_bound_ms(step: MeasuredStep) -> float:
    """Time without messages in flight of the ops at whose end the device had run all that the host had launched."""
    launched, messages = _computed(step.host), _InFlight(step.timeline.spans, None)
    total_ms = 0.0
    for name, spans in _computed(step.timeline.spans).items():
        by_host = launched.get(name, [])
        if len(by_host) != len(spans):  # the two clocks disagree about what is an op's own
            continue
        for span, its in zip(spans, by_host, strict=True):
            if span.end_ms - its.end_ms < _BEHIND_HOST_MS:
                total_ms += span.ms - messages.within_ms(span)
    return total_ms


def _computed(spans: Iterable[Span]) -> dict[str, list[Span]]:
    found: defaultdict[str, list[Span]] = defaultdict(list)
    for span in spans:
        if span.lane is Lane.COMPUTE:
            found[span.name].append(span)
    return found


class _InFlight:
    """Intervals in which messages were in flight."""

    def __init__(self, spans: Iterable[Span], message_ms: Callable[[Span], float] | None) -> None:
        """
        Args:
            message_ms: see :meth:`Samples.add`.
        """
        self._starts: list[float] = []
        self._ends: list[float] = []
        flights = []
        for span in spans:
            if span.lane is Lane.COMM:
                moves_ms = span.ms if message_ms is None else min(span.ms, message_ms(span))
                flights.append((span.end_ms - moves_ms, span.end_ms))
        for start_ms, end_ms in sorted(flights):
            if self._ends and start_ms <= self._ends[-1]:
                self._ends[-1] = max(self._ends[-1], end_ms)
            else:
                self._starts.append(start_ms)
                self._ends.append(end_ms)

    def within_ms(self, span: Span) -> float:
        first, last = bisect_left(self._ends, span.start_ms), bisect_left(self._starts, span.end_ms)
        return sum(
            min(self._ends[index], span.end_ms) - max(self._starts[index], span.start_ms)
            for index in range(first, last)
        )


def _per_micro_batch(times: Sequence[OpSample], num_micro_batches: int) -> list[OpSample]:
    """Adds up an op's spans in each micro-batch: waits cut an op into parts, and it may run several times."""
    parts, rest = divmod(len(times), num_micro_batches)
    if rest:  # the micro-batches differ, so only their mean is known
        return [OpSample(*(sum(column) / num_micro_batches for column in zip(*times, strict=True)))]
    return [
        OpSample(*(sum(column) for column in zip(*times[start : start + parts], strict=True)))
        for start in range(0, len(times), parts)
    ]
