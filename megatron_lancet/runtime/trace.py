"""Records the ops, waits and deferred weight gradients of the computing thread in a step, and the times of messages.

Tracing is on in single steps only; otherwise everything that reports to a trace holds None.

In the forward pass an op reports its end. In the backward pass autograd chooses the order, so the ends of ops are nodes
of their own in the graph (:meth:`Trace.boundary`): identities, whose backward runs when the gradient that arrives there
is complete, and before anything that was created earlier. A tensor's hook would not do: it runs with the node that
*made* the tensor, which may be much later. Where a residual bypasses an op, the op's boundary is before the fork, so
that both branches are complete when it is reached.

Everything between two reports is one op, except for the waits and deferred weight gradients cut out of it. On CUDA
points in time are events on the compute stream, resolved at the end of the step.

A forward that is paired with a backward has a log of its own. Each hand-over from one to the other is in both logs,
and the time of the other is cut out of an op like a wait.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from megatron_lancet.runtime.recorder import Message, Point
from megatron_lancet.runtime.trace_log import Blocked, Busy, BusyClock, Entry, What, blocked_in, spans_of
from megatron_lancet.schedule.nodes import Nodes
from megatron_lancet.schedule.timeline import Lane, RankTimeline, Span


@dataclass(frozen=True)
class WeightGradFacts:
    """Sizes of a deferred weight gradient.

    Attributes:
        pinned_bytes: bytes that each dW of the step kept alive.
        weight_bytes: bytes of the weight's gradient.
    """

    pinned_bytes: tuple[int, ...]
    weight_bytes: int


class RoutedRows(NamedTuple):
    """Destinations of the tokens of one chunk of a rank in one layer, for any dispatch.

    Attributes:
        rows: pairs of a token and one of its experts, by rank of the expert.
        tokens: tokens that have any expert on a rank, by rank.
        node_tokens: tokens that have any expert on a node, by node; empty where nodes are unknown.
    """

    rows: tuple[int, ...]
    tokens: tuple[int, ...]
    node_tokens: tuple[int, ...] = ()

    @staticmethod
    def of(routing_map_tE: torch.Tensor, num_local_experts: int, nodes: Nodes | None = None) -> "RoutedRows":
        """Counts a routing map [t, E]; waits for the device."""
        chosen_tPe = routing_map_tE.view(len(routing_map_tE), -1, num_local_experts)
        goes_tP = chosen_tPe.any(2)
        node_tokens: list[int] = []
        if nodes is not None:
            node_tokens = goes_tP.view(-1, nodes.num_nodes, nodes.ranks_per_node).any(2).sum(0).tolist()
        return RoutedRows(tuple(chosen_tPe.sum((0, 2)).tolist()), tuple(goes_tP.sum(0).tolist()), tuple(node_tokens))


@dataclass(frozen=True)
class StepTrace:
    """Trace of one step on one rank.

    Attributes:
        received_rows: rows that the experts received in each micro-batch, by op name.
        weight_grads: sizes of the deferred dWs, by name.
        routed: where the tokens of the first micro-batch went, by name of the experts' op.
        bytes_to: bytes that each payload message of a name sent to each rank that it connects, in rank order; 0 for
            this rank. By name, in the order of waits.
        blocked: where the thread that computes was blocked, waits for messages apart; empty on CUDA, where times are
            times of the device.
        host: on CUDA the spans of ops, waits and weight gradients by the clock of the host, which launches them.
    """

    timeline: RankTimeline
    received_rows: dict[str, tuple[int, ...]]
    weight_grads: dict[str, WeightGradFacts]
    routed: dict[str, RoutedRows] = field(default_factory=dict)
    bytes_to: dict[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    blocked: tuple[Blocked, ...] = ()
    host: tuple[Span, ...] = ()


class Trace:
    """Log of a step on the global rank ``rank``."""

    def __init__(self, device: torch.device, rank: int) -> None:
        self._on_cuda = device.type == "cuda"
        self._rank = rank
        self._busy = (lambda: Busy(0, time.perf_counter())) if self._on_cuda else BusyClock().now
        self.begin_step()

    def begin_step(self) -> None:
        """Clears the log and starts the step now."""
        self.log: list[Entry] = []
        self._forward_log: list[Entry] = []
        self._messages: list[tuple[str, int, Message]] = []
        self._rows: defaultdict[str, list[int]] = defaultdict(list)
        self._pinned: defaultdict[str, list[int]] = defaultdict(list)
        self._weight_bytes: dict[str, int] = {}
        self._routing_maps: dict[str, tuple[torch.Tensor, int, Nodes | None]] = {}
        if self._on_cuda:
            torch.cuda.synchronize()  # makes the clocks of host and stream agree about the beginning
        self._bytes_to: defaultdict[str, list[tuple[int, ...]]] = defaultdict(list)
        self._start_s = time.perf_counter()
        self._start = self._now()
        self._first = self._entry(What.SKIP)

    def end_step(self) -> StepTrace:
        """Ends the step now and returns its trace."""
        end = self._now()
        if self._on_cuda:
            torch.cuda.synchronize()
        spans, host = list[Span](), list[Span]()
        blocked = () if self._on_cuda else (*blocked_in([self._first, *self.log]), *blocked_in(self._forward_log))
        for log in (self.log, self._forward_log):
            spans += spans_of([entry._replace(point=self._ms(entry.point)) for entry in log])
            host += spans_of([e._replace(point=self._ms(e.busy.seconds)) for e in log if e.busy and self._on_cuda])
        # What a message holds leads through the step's graph back to this trace: kept, none of it would ever be freed.
        messages, self._messages = self._messages, []
        for name, num_bytes, message in messages:
            start, end_of_message = message.interval()
            spans.append(Span(name, Lane.COMM, self._ms(start), self._ms(end_of_message), num_bytes))
        spans.sort(key=lambda span: (span.start_ms, span.end_ms))
        routing_maps, self._routing_maps = self._routing_maps, {}
        return StepTrace(
            RankTimeline(self._rank, tuple(spans), self._ms(end)),
            {name: tuple(rows) for name, rows in self._rows.items()},
            {name: WeightGradFacts(tuple(pinned), self._weight_bytes[name]) for name, pinned in self._pinned.items()},
            {name: RoutedRows.of(*routing) for name, routing in routing_maps.items()},
            {name: tuple(sent) for name, sent in self._bytes_to.items()},
            tuple(Blocked(self._ms(one.start_ms / 1e3), self._ms(one.end_ms / 1e3), one.ms) for one in sorted(blocked)),
            tuple(host),
        )

    def skip(self) -> None:
        """Assigns the time since the last entry to no op."""
        self.log.append(self._entry(What.SKIP))

    def end(self, name: str) -> None:
        """Ends the op ``name``, which began where the previous op ended."""
        self.log.append(self._entry(What.END, name))

    @contextmanager
    def waiting(self, name: str) -> Iterator[None]:
        """Records a wait of the thread, or of the stream, for the message ``name`` inside the context."""
        self.log.append(self._entry(What.CUT, name, Lane.WAIT))
        try:
            yield
        finally:
            self.log.append(self._entry(What.RESUME, name, Lane.WAIT))

    @contextmanager
    def forward_turn(self) -> Iterator[None]:
        """Inside, a forward takes a turn: what is recorded goes to the log of forwards."""
        backward_log = self.log
        self._hand_over(backward_log, self._forward_log)
        try:
            yield
        finally:
            self._hand_over(self._forward_log, backward_log)

    def _hand_over(self, own: list[Entry], other: list[Entry]) -> None:
        now = self._entry(What.LEAVE)
        own.append(now)
        other.append(now._replace(what=What.RETURN))
        self.log = other

    @contextmanager
    def weight_grad(self, name: str, pinned_bytes: int, weight_bytes: int) -> Iterator[None]:
        """Records the deferred weight gradient inside the context.

        Args:
            pinned_bytes: bytes that it kept alive.
            weight_bytes: bytes of the weight's gradient.
        """
        self._pinned[name].append(pinned_bytes)
        self._weight_bytes[name] = weight_bytes
        self.log.append(self._entry(What.CUT, name))
        try:
            yield
        finally:
            self.log.append(self._entry(What.RESUME, name))

    def sent(self, name: str, num_bytes: int, message: Message, bytes_to: Sequence[int] = ()) -> None:
        """Records a message that arrives before the end of the step.

        Args:
            num_bytes: bytes that are sent to other ranks.
            bytes_to: the same by rank that the message connects; empty for token counts.
        """
        self._messages.append((name, num_bytes, message))
        if bytes_to:
            self._bytes_to[name].append(tuple(bytes_to))

    def received(self, name: str, num_rows: int) -> None:
        """Records the number of rows that the op ``name`` works on."""
        self._rows[name].append(num_rows)

    def routed(
        self, name: str, routing_map_tE: torch.Tensor, num_local_experts: int, nodes: Nodes | None = None
    ) -> None:
        """Records the experts of a chunk's tokens, of the first micro-batch of a step.

        They are counted when the step has ended, so that the step neither waits for counts nor makes them.

        Args:
            name: op of the experts.
            routing_map_tE: bool, [t, E]; must not be changed afterwards.
            num_local_experts: experts of each rank; the experts of a rank are neighbours.
            nodes: how the expert-parallel group lies on nodes; None where that is unknown.
        """
        self._routing_maps.setdefault(name, (routing_map_tE, num_local_experts, nodes))

    def boundary(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Returns the same values; the backward op ``name`` ends when their gradient is complete."""
        return self._with_backward(tensor, lambda: self.end(name))

    def begin_backward(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the same values; the time before their gradient is complete belongs to no op."""
        return self._with_backward(tensor, self.skip)

    def last_boundary(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Returns the same values; the rest of the backward pass after them is the op ``name``."""

        def until_the_end() -> None:
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self.end(name))

        return self._with_backward(tensor, until_the_end)

    @staticmethod
    def _with_backward(tensor: torch.Tensor, then: Callable[[], None]) -> torch.Tensor:
        return _Boundary.apply(tensor, then) if tensor.requires_grad else tensor

    def _entry(self, what: What, name: str = "", lane: Lane = Lane.COMPUTE) -> Entry:
        """An entry for now."""
        return Entry(what, name, self._now(), lane, self._busy())

    def _now(self) -> Point:
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _ms(self, point: Point) -> float:
        """Returns milliseconds since the beginning of the step."""
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
