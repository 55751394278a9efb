"""Records what the computing thread does in a step: ops, waits, deferred weight gradients; and when messages travel.

Switched on for single steps; where it is off, every place that reports here holds None.

Forward, an op reports its end. Backward, autograd runs what it likes, so the ends of ops are nodes of their own in the
graph (:meth:`Trace.boundary`): identities, whose backward runs when the gradient that arrives there is complete, and
before anything that was created earlier. A tensor's hook would not do: it runs with the node that *made* the tensor,
which may be much later. Where a residual goes round an op, the op's boundary is in front of the fork, so that both
ways are over when it is reached.

Everything between two reports is one op, but for what is cut out of it: waits and deferred weight gradients. On CUDA
points in time are events on the compute stream, resolved at the end of the step.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any, NamedTuple, Protocol

import torch

from megatron_lancet.schedule.ops import Op
from megatron_lancet.schedule.timeline import Lane, RankTimeline, Span

Point = float | torch.cuda.Event
"""Seconds of ``time.perf_counter``, or an event on a stream."""

_OVERHEAD_MS = 0.05
"""What lies between an op's end and a wait is autograd's own work, up to this long; it goes to the op before. What lies
before a weight gradient is the store's, and goes to the weight gradient."""


class Message(Protocol):
    """Something that was on the wire."""

    def interval(self) -> tuple[Point, Point]:
        """When it left and when it was complete; called after it was waited for."""


class What(Enum):
    """What an entry of the log says about the time before it, or after it."""

    END = auto()
    """An op ends."""
    SKIP = auto()
    """What came before belongs to no op."""
    CUT = auto()
    """A wait or a weight gradient begins."""
    RESUME = auto()
    """It ends."""


class Entry(NamedTuple):
    """A line of the log.

    Attributes:
        lane: of a cut.
    """

    what: What
    name: str
    point: Any
    lane: Lane = Lane.COMPUTE


@dataclass(frozen=True)
class WeightGradFacts:
    """Of a deferred weight gradient.

    Attributes:
        pinned_bytes: that it kept alive, of each that ran.
        weight_bytes: of the gradient that it completes.
    """

    pinned_bytes: tuple[int, ...]
    weight_bytes: int


@dataclass(frozen=True)
class StepTrace:
    """One step on one rank.

    Attributes:
        timeline: its spans.
        received_rows: rows that the experts got, by the op's name, of each micro-batch.
        weight_grads: by name.
    """

    timeline: RankTimeline
    received_rows: dict[str, tuple[int, ...]]
    weight_grads: dict[str, WeightGradFacts]


class Trace:
    """The log of a step."""

    def __init__(self, device: torch.device, rank: int) -> None:
        """
        Args:
            rank: global.
        """
        self._on_cuda = device.type == "cuda"
        self._rank = rank
        self.begin_step()

    def begin_step(self) -> None:
        """Forgets what was recorded; the step begins now."""
        self.log: list[Entry] = []
        self._messages: list[tuple[str, int, Message]] = []
        self._rows: defaultdict[str, list[int]] = defaultdict(list)
        self._pinned: defaultdict[str, list[int]] = defaultdict(list)
        self._weight_bytes: dict[str, int] = {}
        if self._on_cuda:
            torch.cuda.synchronize()  # so that the clock of the host and the stream's agree about the beginning
        self._start_s = time.perf_counter()
        self._start = self._now()

    def end_step(self) -> StepTrace:
        """What was recorded since :meth:`begin_step`; the step ends now."""
        end = self._now()
        if self._on_cuda:
            torch.cuda.synchronize()
        spans = spans_of([entry._replace(point=self._ms(entry.point)) for entry in self.log])
        for name, num_bytes, message in self._messages:
            left, landed = message.interval()
            spans.append(Span(name, Lane.COMM, self._ms(left), self._ms(landed), num_bytes))
        spans.sort(key=lambda span: (span.start_ms, span.end_ms))
        return StepTrace(
            RankTimeline(self._rank, tuple(spans), self._ms(end)),
            {name: tuple(rows) for name, rows in self._rows.items()},
            {name: WeightGradFacts(tuple(pinned), self._weight_bytes[name]) for name, pinned in self._pinned.items()},
        )

    def skip(self) -> None:
        """What the thread did up to now belongs to no op."""
        self.log.append(Entry(What.SKIP, "", self._now()))

    def end(self, name: str) -> None:
        """The op ``name`` ends; it began where the one before it ended."""
        self.log.append(Entry(What.END, name, self._now()))

    @contextmanager
    def waiting(self, name: str) -> Iterator[None]:
        """The thread, or the stream, stands still inside for the message ``name``."""
        self.log.append(Entry(What.CUT, name, self._now(), Lane.WAIT))
        try:
            yield
        finally:
            self.log.append(Entry(What.RESUME, name, self._now(), Lane.WAIT))

    @contextmanager
    def weight_grad(self, name: str, pinned_bytes: int, weight_bytes: int) -> Iterator[None]:
        """A deferred weight gradient runs inside.

        Args:
            pinned_bytes: that it kept alive.
            weight_bytes: of the weight's gradient.
        """
        self._pinned[name].append(pinned_bytes)
        self._weight_bytes[name] = weight_bytes
        self.log.append(Entry(What.CUT, name, self._now(), Lane.COMPUTE))
        try:
            yield
        finally:
            self.log.append(Entry(What.RESUME, name, self._now()))

    def sent(self, name: str, num_bytes: int, message: Message) -> None:
        """A message that will have landed by the end of the step.

        Args:
            num_bytes: sent to others.
        """
        self._messages.append((name, num_bytes, message))

    def received(self, name: str, num_rows: int) -> None:
        """The op ``name`` works on as many rows."""
        self._rows[name].append(num_rows)

    def boundary(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """The same values; when their gradient is complete, the backward op ``name`` ends."""
        return self._with_backward(tensor, lambda: self.end(name))

    def begin_backward(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same values; what runs before their gradient is complete belongs to no op."""
        return self._with_backward(tensor, self.skip)

    def last_boundary(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """The same values; everything that follows in their backward pass is the op ``name``."""

        def until_the_end() -> None:
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self.end(name))

        return self._with_backward(tensor, until_the_end)

    @staticmethod
    def _with_backward(tensor: torch.Tensor, then: Callable[[], None]) -> torch.Tensor:
        return _Boundary.apply(tensor, then) if tensor.requires_grad else tensor

    def _now(self) -> Point:
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _ms(self, point: Point) -> float:
        """Milliseconds from the beginning of the step."""
        if isinstance(point, float):
            return (point - self._start_s) * 1e3
        assert not isinstance(self._start, float)
        return self._start.elapsed_time(point)


class _Boundary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, then: Callable[[], None]) -> torch.Tensor:
        ctx.then = then
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.then()
        return grad, None


def waiting(trace: Trace | None, op: Op) -> AbstractContextManager[None]:
    """The computing thread waits for ``op`` inside.

    Args:
        trace: None where nothing is recorded.
    """
    return nullcontext() if trace is None else trace.waiting(str(op))


def spans_of(log: Sequence[Entry]) -> list[Span]:
    """Spans of the computing thread, by start; points of the log are milliseconds.

    An op that a wait or a weight gradient cuts in two has two spans. What is open at the end belongs to no op.
    """
    spans: list[Span] = []
    parts: list[tuple[float, float]] = []
    open_ms = cut_ms = 0.0
    for what, name, point_ms, lane in log:
        if what is What.END:
            parts.append((open_ms, point_ms))
            if spans and spans[-1].name == name and spans[-1].end_ms == parts[0][0]:
                parts[0] = (spans.pop().start_ms, parts[0][1])  # it ended in two steps
            spans += [Span(name, Lane.COMPUTE, *part) for part in parts]
        elif what is What.CUT:
            cut_ms = point_ms
            if point_ms - open_ms >= _OVERHEAD_MS:
                parts.append((open_ms, point_ms))
            elif lane is Lane.COMPUTE:
                cut_ms = open_ms
            elif spans and spans[-1].end_ms == open_ms:
                spans[-1] = replace(spans[-1], end_ms=point_ms)
            continue
        elif what is What.RESUME:
            spans.append(Span(name, lane, cut_ms, point_ms))
            open_ms = point_ms
            continue
        parts, open_ms = [], point_ms
    return sorted(spans, key=lambda span: (span.start_ms, span.end_ms))
