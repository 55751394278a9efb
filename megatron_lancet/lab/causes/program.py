"""The work of each rank's computing thread in a traced step, as a list that can be replayed at other paces.

An op is cut into parts by waits, weight gradients and messages that it launches. Its parts of all ranks belong
together, so that an op takes as long as the ranks' median of the same op where drift is removed.
"""

import statistics
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import NamedTuple

from megatron_lancet.lab.causes.traced import Key, TracedRank, kind_of
from megatron_lancet.schedule.ops import FIRST_DISPATCHES, Op, OpKind, Phase
from megatron_lancet.schedule.timeline import Lane, Span
from megatron_lancet.schedule.turns import ROWS_MADE_BY

_GAP_MS = 0.02
"""A shorter time between two ops is none."""
_LATE_LAUNCH_MS = 1.0
"""A dispatch that leaves later than this after its counts was launched by the thread, not by the arrival of counts."""
_MIN_SPREAD = 0.1
"""Standard deviation of rows over their mean below which an op's time without rows is unknown."""
_BETWEEN = "between ops, before "


class Code(IntEnum):
    """Kind of an item of a program."""

    WORK = 0
    LAUNCH = 1
    WAIT = 2
    WEIGHT_GRAD = 3


class Item(NamedTuple):
    """A part of an op, a launch or a wait.

    Attributes:
        key: of the op, or of the message.
        busy_ms: time that a part of an op takes while its thread, or the device, works on it.
        blocked_ms: time that it takes beyond that.
        needs: counts that must have arrived before the message leaves; None if it leaves at once.
        name: of a weight gradient; all experts of a layer share one key.
    """

    code: Code
    key: Key
    busy_ms: float = 0.0
    blocked_ms: float = 0.0
    needs: Key | None = None
    name: str = ""


@dataclass(frozen=True)
class OpTimes:
    """One op on all ranks of the group.

    Attributes:
        busy_ms: by rank of the group.
        rows: rows that it worked on by rank of the group, to which its time is proportional: those received, and as
            many as it would do in the time that it takes without any. Empty if its time does not depend on rows.
    """

    busy_ms: tuple[float, ...]
    rows: tuple[float, ...] = ()

    def factors(self, even_rows: bool, no_drift: bool) -> tuple[float, ...]:
        """By rank of the group, the factor of the op's time without uneven rows, without drift, or without both."""
        mean_rows = statistics.fmean(self.rows) if self.rows else 0.0
        if not self.rows or min(self.rows) == 0:
            usual_ms = statistics.median(self.busy_ms)
            return tuple(usual_ms / ms if no_drift and ms > 0 else 1.0 for ms in self.busy_ms)
        usual_row_ms = statistics.median(ms / rows for ms, rows in zip(self.busy_ms, self.rows, strict=True))
        return tuple(
            (usual_row_ms * rows / ms if no_drift and ms > 0 else 1.0) * (mean_rows / rows if even_rows else 1.0)
            for ms, rows in zip(self.busy_ms, self.rows, strict=True)
        )


@dataclass(frozen=True)
class Programs:
    """The step of a group.

    Attributes:
        items: by rank of the group.
        late_ms: by rank of the group, how much later than the first it began the step.
        ops: ops that all ranks have.
    """

    items: tuple[tuple[Item, ...], ...]
    late_ms: tuple[float, ...]
    ops: Mapping[Key, OpTimes]

    @staticmethod
    def of(ranks: Sequence[TracedRank]) -> "Programs":
        """The programs of ranks whose clocks are aligned."""
        first_ms = min(rank.start_ms for rank in ranks)
        items = tuple(tuple(_Reader(rank).items()) for rank in ranks)
        return Programs(items, tuple(rank.start_ms - first_ms for rank in ranks), _ops(items, ranks))


def _ops(programs: Sequence[Sequence[Item]], ranks: Sequence[TracedRank]) -> dict[Key, OpTimes]:
    busy_ms: defaultdict[Key, list[float]] = defaultdict(lambda: [0.0] * len(ranks))
    seen: defaultdict[Key, set[int]] = defaultdict(set)
    for place, items in enumerate(programs):
        for item in items:
            if item.code in (Code.WORK, Code.WEIGHT_GRAD):
                busy_ms[item.key][place] += item.busy_ms
                seen[item.key].add(place)
    of_all = {key: OpTimes(tuple(ms), _rows(key, ranks)) for key, ms in busy_ms.items() if len(seen[key]) == len(ranks)}
    return _with_fixed_rows(of_all, _paces([op for op in of_all.values() if not op.rows], len(ranks)))


def _paces(ops: Sequence[OpTimes], num_ranks: int) -> list[float]:
    """By rank of the group, the time of its ops over the ranks' median for the same ops."""
    usual_ms = sum(statistics.median(op.busy_ms) for op in ops)
    return [sum(op.busy_ms[place] for op in ops) / usual_ms if usual_ms else 1.0 for place in range(num_ranks)]


def _with_fixed_rows(ops: Mapping[Key, OpTimes], paces: Sequence[float]) -> dict[Key, OpTimes]:
    """The same ops, where ops of experts have the time that they take without rows, as rows.

    It is found from all ops of a kind and phase: a line through their rows and times, at an even pace of the ranks.

    Args:
        paces: by rank of the group, in the other ops.
    """
    points: defaultdict[Phase, list[tuple[float, float]]] = defaultdict(list)
    for (name, _), op in ops.items():
        if op.rows:
            even_ms = (ms / pace for ms, pace in zip(op.busy_ms, paces, strict=True))
            points[Op.parse(name).phase] += zip(op.rows, even_ms, strict=True)
    fixed = {phase: fixed_rows(of_phase) for phase, of_phase in points.items()}
    return {
        key: replace(op, rows=tuple(rows + fixed[Op.parse(key[0]).phase] for rows in op.rows)) if op.rows else op
        for key, op in ops.items()
    }


def fixed_rows(points: Sequence[tuple[float, float]]) -> float:
    """Rows that take as long as no rows do, by a line through points of rows and times; 0 where rows hardly differ.

    It is at most the mean of rows: with hardly any more time for more rows, something else than rows differs. It is
    below 0 where many rows take more time each than few, as when they leave a cache; the line is only used between the
    fewest rows and the most, and at least half of the fewest remain.
    """
    rows, times_ms = zip(*points, strict=True)
    mean_rows = statistics.fmean(rows)
    if len(points) < 2 or statistics.pstdev(rows) < _MIN_SPREAD * mean_rows:
        return 0.0
    slope_ms, at_none_ms = statistics.linear_regression(rows, times_ms)
    if slope_ms <= 0:
        return mean_rows
    return min(max(-min(rows) / 2, at_none_ms / slope_ms), mean_rows)


def _rows(key: Key, ranks: Sequence[TracedRank]) -> tuple[int, ...]:
    """Rows of an op by rank of the group, or in a step for weight gradients; empty if it is not of routed experts."""
    name, occurrence = key
    op = Op.find(name)
    if op is None:
        return ()
    if _is_of_experts(op):
        found = [_rows_in_layer(rank, op.layer) for rank in ranks]
    elif op.kind in (OpKind.OWN_EXPERTS, OpKind.EXPERTS):
        name = str(replace(op, phase=Phase.FORWARD))
        of_ranks = [(rank.received_rows or {}).get(name, ()) for rank in ranks]
        found = [rows[occurrence] if occurrence < len(rows) else 0 for rows in of_ranks]
    else:
        return ()
    return tuple(found) if any(found) else ()


def _is_weight_grad(name: str) -> bool:
    op = Op.find(name)
    return op is not None and op.phase is Phase.WEIGHT_GRAD


def _is_of_experts(weight_grad: Op) -> bool:
    """Whether it is a weight gradient of routed experts."""
    return weight_grad.phase is Phase.WEIGHT_GRAD and OpKind.EXPERTS in weight_grad.kind.split(".")


def _rows_in_layer(rank: TracedRank, layer: int | None) -> int:
    """Rows of a rank's experts in a layer and step."""
    return sum(sum(rows) for name, rows in (rank.received_rows or {}).items() if Op.parse(name).layer == layer)


class _Reader:
    """Reads the program of one rank."""

    def __init__(self, rank: TracedRank) -> None:
        self._rank = rank
        self._spans = rank.thread_spans()
        self._op_keys = list(_op_keys(self._spans))
        self._messages = rank.messages()
        self._launches = deque(sorted(self._find_launches(), key=lambda launch: launch[0]))
        self._waits: dict[str, int] = {}
        self._next_blocked = 0

    def items(self) -> Iterator[Item]:
        """Yields its items in order."""
        now_ms = self._rank.start_ms
        for span, key in zip(self._spans, self._op_keys, strict=True):
            if span.start_ms - now_ms > _GAP_MS:
                yield from self._parts((_BETWEEN + span.name, key[1]), now_ms, span.start_ms, is_gap=True)
            if span.lane is Lane.WAIT:
                yield from (launch for _, launch in self._launched_until(span.end_ms))
                message = _waited_for(span, self._messages, self._waits)
                if message is not None:
                    yield Item(Code.WAIT, message)
            else:
                for item in self._parts(key, span.start_ms, span.end_ms):
                    is_weight_grad = item.code is Code.WORK and _is_weight_grad(span.name)
                    yield item._replace(code=Code.WEIGHT_GRAD, name=span.name) if is_weight_grad else item
            now_ms = max(now_ms, span.end_ms)
        yield from (launch for _, launch in self._launched_until(float("inf")))

    def _launched_until(self, end_ms: float) -> Iterator[tuple[float, Item]]:
        while self._launches and self._launches[0][0] <= end_ms:
            yield self._launches.popleft()

    def _parts(self, key: Key, start_ms: float, end_ms: float, is_gap: bool = False) -> Iterator[Item]:
        """Yields an op, or the time between two, with the launches inside it."""
        blocked_ms = min(self._blocked_ms(start_ms, end_ms), end_ms - start_ms)
        if is_gap and self._rank.follows_host:
            blocked_ms = end_ms - start_ms
        share = blocked_ms / (end_ms - start_ms) if end_ms > start_ms else 0.0
        for launched_ms, launch in self._launched_until(end_ms):
            ms = max(0.0, launched_ms - start_ms)
            yield Item(Code.WORK, key, ms * (1 - share), ms * share)
            yield launch
            start_ms = max(start_ms, launched_ms)
        yield Item(Code.WORK, key, (end_ms - start_ms) * (1 - share), (end_ms - start_ms) * share)

    def _blocked_ms(self, start_ms: float, end_ms: float) -> float:
        """Time blocked between two points; asked for in the order of time."""
        blocked, total_ms = self._rank.blocked, 0.0
        while self._next_blocked < len(blocked) and blocked[self._next_blocked][1] <= start_ms:
            self._next_blocked += 1
        for first_ms, last_ms, ms in blocked[self._next_blocked :]:
            if first_ms >= end_ms:
                break
            beside_ms = min(last_ms, end_ms) - max(first_ms, start_ms)
            total_ms += ms * max(0.0, beside_ms) / (last_ms - first_ms)
        return total_ms

    def _find_launches(self) -> Iterator[tuple[float, Item]]:
        """Yields when the thread came to each launch, and the launch."""
        of_compute = zip(self._op_keys, self._spans, strict=True)
        ended_ms = {key: span.end_ms for key, span in of_compute if span.lane is Lane.COMPUTE}
        for key, span in self._messages.items():
            op = Op.parse(span.name)
            if op.phase is Phase.FORWARD and op.kind in FIRST_DISPATCHES:
                untiled = replace(op, tile=None)  # all tiles are made by one op, and wait for the same counts
                made_ms = ended_ms.get((str(untiled.with_kind(ROWS_MADE_BY[OpKind(op.kind)])), key[1]))
                counts = str(untiled.with_kind(OpKind.COUNTS)), key[1]
                if made_ms is not None and counts in self._messages:
                    late_ms = span.start_ms - max(made_ms, self._messages[counts].end_ms)
                    if abs(late_ms) < _LATE_LAUNCH_MS:
                        yield made_ms, Item(Code.LAUNCH, key, needs=counts)
                        continue
            yield span.start_ms, Item(Code.LAUNCH, key)


def _op_keys(spans: Sequence[Span]) -> Iterator[Key]:
    """Yields the key of the op of each span: parts of one op have one key, and the next micro-batch's another.

    An op is over when another op of its pass has run. A weight gradient is in one part. The weight gradients of all
    experts of a layer
    are one op of the step: which of a rank's experts has how many rows is not known.
    """
    occurrence: dict[str, int] = {}
    last: dict[str, str] = {}
    for span in spans:
        op = Op.find(span.name)
        phase = "" if op is None else op.phase
        if op is not None and _is_of_experts(op):
            yield str(Op.weight_grad(op.layer, OpKind.EXPERTS)), 0
            continue
        if span.lane is Lane.COMPUTE and (phase == Phase.WEIGHT_GRAD or last.get(phase) != span.name):
            occurrence[span.name] = occurrence.get(span.name, -1) + 1
            last[phase] = span.name
        yield span.name, max(0, occurrence.get(span.name, 0))


def _waited_for(wait: Span, messages: Mapping[Key, Span], waits: dict[str, int]) -> Key | None:
    """The message that a wait is for; None if it is none of expert parallelism.

    Each message with rows is waited for once. Of counts only those that were late are.
    """
    if kind_of(wait.name) is OpKind.COUNTS:
        own = [key for key, span in messages.items() if key[0] == wait.name and span.start_ms <= wait.end_ms]
        return own[-1] if own else None
    key = wait.name, waits.get(wait.name, 0)
    waits[wait.name] = key[1] + 1
    return key if key in messages else None
