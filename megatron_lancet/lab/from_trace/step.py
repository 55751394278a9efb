"""The spans of a traced step, as the profiler's own trace has them, and the messages in it."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron_lancet.lab.from_trace.backward import DwSizes, read_backward
from megatron_lancet.lab.from_trace.events import Event, RankEvents
from megatron_lancet.lab.from_trace.forward import Forward, read_forward
from megatron_lancet.lab.from_trace.kernels import device_marks
from megatron_lancet.lab.from_trace.lacks import TraceLacks
from megatron_lancet.lab.from_trace.marks import Mark, spans_of
from megatron_lancet.lab.from_trace.passes import MicroBatch, micro_batches
from megatron_lancet.schedule.ops import Op, OpKind, Phase
from megatron_lancet.schedule.timeline import Lane, RankTimeline, Span

_US_PER_MS = 1e3
_OUTPUT, _INPUT, _OUTPUT_SPLITS, _INPUT_SPLITS = 0, 1, 3, 4
"""Places of the arguments of ``c10d::alltoall_base_``."""


class Sent(NamedTuple):
    """One all-to-all of rows.

    Attributes:
        name: of its op; a dispatch with a message for probabilities gives its name to two all-to-alls.
        row_bytes: bytes of one row.
        sent_rows: to each rank of the group.
        received_rows: from each rank of the group.
        ms: from its launch to the end of the wait for it, so that waiting for ranks which launch it later is in it.
    """

    name: str
    row_bytes: int
    sent_rows: tuple[int, ...]
    received_rows: tuple[int, ...]
    ms: float

    def busiest_bytes(self, place: int) -> int:
        """Bytes that the rank at a place sends to others or receives from them, whichever are more."""
        others = (sum(rows) - rows[place] for rows in (self.sent_rows, self.received_rows))
        return max(others) * self.row_bytes


@dataclass
class OpParts:
    """Parts of an op's time: in calls that grow with the tokens, and of these in the attention's core."""

    ms: float = 0.0
    scaled_ms: float = 0.0
    core_ms: float = 0.0


@dataclass(frozen=True)
class TracedStep:
    """One step on one rank; a :class:`~megatron_lancet.planning.measured.op_times.MeasuredStep`.

    Attributes:
        forwards: the forward passes, by micro-batch.
        sent: all-to-alls of rows, in order.
        counts_ms: times of the exchanges of token counts, in order.
        parts: of ops, by name.
        host: empty: the profile of a trace has no times of launches.
    """

    timeline: RankTimeline
    received_rows: Mapping[str, Sequence[int]]
    weight_grads: Mapping[str, DwSizes]
    forwards: tuple[Forward, ...]
    batches: tuple[MicroBatch, ...]
    sent: tuple[Sent, ...]
    counts_ms: tuple[float, ...]
    parts: Mapping[str, OpParts]
    host: tuple[Span, ...] = ()


@dataclass
class _Collected:
    """Collects a step from its micro-batches."""

    spans: list[Span] = field(default_factory=list)
    received_rows: defaultdict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    pinned: defaultdict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    weight_bytes: dict[str, int] = field(default_factory=dict)
    sent: list[Sent] = field(default_factory=list)
    counts_ms: list[float] = field(default_factory=list)
    parts: defaultdict[str, OpParts] = field(default_factory=lambda: defaultdict(OpParts))


def read_step(rank: RankEvents, step: tuple[float, float], first_layers: Sequence[int] = (1,)) -> TracedStep:
    """Reads one step.

    Args:
        first_layers: number of the first layer of each part of the layers that the rank has.

    Raises:
        TraceLacks: something is not there, or not supported.
    """
    found = _Collected()
    batches = micro_batches(rank, step, len(first_layers))
    forwards = []
    for batch in batches:
        forwards.append(_add(found, rank, batch, step[0], first_layers[batch.part]))
    found.spans.sort(key=lambda span: (span.start_ms, span.end_ms))
    step_ms = (step[1] - step[0]) / _US_PER_MS
    return TracedStep(
        timeline=RankTimeline(rank.rank, tuple(found.spans), step_ms),
        received_rows=dict(found.received_rows),
        weight_grads={name: DwSizes(tuple(pinned), found.weight_bytes[name]) for name, pinned in found.pinned.items()},
        forwards=tuple(forwards),
        batches=tuple(batches),
        sent=tuple(found.sent),
        counts_ms=tuple(found.counts_ms),
        parts=dict(found.parts),
    )


def _add(found: _Collected, rank: RankEvents, batch: MicroBatch, zero_us: float, first_layer: int) -> Forward:
    """Adds a micro-batch to what was found in its step."""
    forward = read_forward(rank.path, batch, first_layer)
    backward = read_backward(rank.path, batch, forward)
    calls = [(name, call.launch, call.outer.end_us) for name, call in forward.messages] + backward.messages
    passes = [(batch.begin_us, forward.marks), (batch.begin_backward_us, backward.marks)]
    if rank.device is None:
        times_ms = [(end_us - launch.start_us) / _US_PER_MS for _, launch, end_us in calls]
        counts = [one.counts for one in forward.calls.values()]
        found.counts_ms += [(call.outer.end_us - call.launch.start_us) / _US_PER_MS for call in counts]
    else:
        kernels: list[tuple[str, Event]] = []
        for place, on_host in enumerate(passes):
            begin_us, marks, of_messages = device_marks(rank, *on_host)
            passes[place] = (begin_us, marks)
            kernels += of_messages
        times_ms = _times_of_kernels(found, rank.path, kernels, calls)
    for begin_us, marks in passes:
        found.spans += spans_of(begin_us, marks, zero_us)
        _add_parts(found, begin_us, marks)
    for (name, launch, end_us), ms in zip(calls, times_ms, strict=True):
        message = _sent(rank.path, name, launch, ms)
        found.sent.append(message)
        place = _place_of(rank)
        end_ms = (end_us - zero_us) / _US_PER_MS
        found.spans.append(Span(name, Lane.COMM, end_ms - ms, end_ms, message.busiest_bytes(place)))
    for number, moe in forward.calls.items():
        rows = _sent(rank.path, "", moe.dispatches[0].launch, 0.0).received_rows
        found.received_rows[str(Op(number, 0, Phase.FORWARD, OpKind.EXPERTS))].append(sum(rows))
    for name, sizes in backward.weight_grads.items():
        found.pinned[name] += sizes.pinned_bytes
        found.weight_bytes[name] = sizes.weight_bytes
    return forward


def _add_parts(found: _Collected, begin_us: float, marks: Sequence[Mark]) -> None:
    for mark in marks:
        if mark.lane is Lane.COMPUTE and mark.name:
            parts = found.parts[mark.name]
            parts.ms += (mark.end_us - begin_us) / _US_PER_MS
            parts.scaled_ms += mark.scaled_us / _US_PER_MS
            parts.core_ms += mark.core_us / _US_PER_MS
        begin_us = mark.end_us


def _times_of_kernels(
    found: _Collected,
    path: str,
    kernels: Sequence[tuple[str, Event]],
    calls: Sequence[tuple[str, Event, float]],
) -> list[float]:
    """Times of the messages in the order of ``calls``; times of the token counts go into ``found``."""
    times_ms = []
    for name, kernel in kernels:
        ms = (kernel.end_us - kernel.start_us) / _US_PER_MS
        if Op.parse(name).kind == OpKind.COUNTS:
            found.counts_ms.append(ms)
        else:
            times_ms.append(ms)
    if len(times_ms) != len(calls):
        raise TraceLacks(path, f"{len(times_ms)} kernels of all-to-alls for {len(calls)} that the host launched")
    return times_ms


def _place_of(rank: RankEvents) -> int:
    return expert_group(rank).index(rank.rank)


def expert_group(rank: RankEvents) -> tuple[int, ...]:
    """The ranks that share the experts.

    Raises:
        TraceLacks: the trace does not say which these are.
    """
    group = rank.groups.get("EXPERT_MODEL_PARALLEL") or _group_of_kernels(rank)
    if not group:
        raise TraceLacks(rank.path, "no process group EXPERT_MODEL_PARALLEL_GROUP in distributedInfo")
    return group


def _group_of_kernels(rank: RankEvents) -> tuple[int, ...]:
    """The ranks that NCCL's kernels of all-to-alls name; empty without them."""
    for kernel in rank.kernels:
        if str(kernel.args.get("Collective name", "")).startswith("all_to_all"):
            ranks = _splits(str(kernel.args.get("Process Group Ranks", "")))
            if rank.rank in ranks:
                return ranks
    return ()


def _sent(path: str, name: str, launch: Event, ms: float) -> Sent:
    if len(launch.dims) <= _INPUT or len(launch.scalars) <= _INPUT_SPLITS:
        raise TraceLacks(path, "no shapes and split sizes of its all-to-alls")
    received, sent = (_splits(launch.scalars[place]) for place in (_OUTPUT_SPLITS, _INPUT_SPLITS))
    if not received or not sent:
        raise TraceLacks(path, "all-to-alls without split sizes", "Record without --moe-pad-expert-input-to-capacity")
    row_bytes = launch.element_bytes(_INPUT)
    for size in launch.dims[_INPUT][1:]:
        row_bytes *= int(size)
    return Sent(name, row_bytes, sent, received, ms)


def _splits(text: str) -> tuple[int, ...]:
    try:
        value = json.loads(text)
    except ValueError:
        return ()
    return tuple(int(part) for part in value) if isinstance(value, list) else ()
