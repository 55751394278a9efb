"""The engine where several things are on a rank's wire at once: each gets an equal part (processor sharing).

What goes through the same connections or the same stream is a *flow*, and goes out one after the other: all-to-alls,
reductions of dense gradients, those of experts', and where the link says so (``dispatches_apart``) forward
dispatches. While n flows have something to send, each message takes n times as long as alone. With one flow every
time is the plain engine's.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from megatron_lancet.planning.simulation.buckets import Buckets, Ledger
from megatron_lancet.planning.simulation.dw_queue import DwRules
from megatron_lancet.planning.simulation.engine import Engine, Network, Paces, PhaseResult, _Message, _Rank
from megatron_lancet.planning.simulation.lowering import COMPUTE, Action, Step
from megatron_lancet.schedule.ops import OpKind, Phase
from megatron_lancet.schedule.timeline import Lane, Span

_NEVER = float("inf")
_DONE_MS = 1e-9
"""What is left of a part that has been sent: rounding."""
_NUM_FLOWS = 4
_MESSAGES, _DISPATCHES, _FIRST_REDUCTIONS = 0, 1, 2
_SERVED = Action(COMPUTE, "served", 0, (), ())
_LAUNCHED = Action(COMPUTE, "launched", 0, (), ())


@dataclass(slots=True)
class _OnWire:
    """A message or a reduction. Its ranks' parts end at different times.

    Attributes:
        message: None for a reduction.
        launched_ms: of a reduction, by rank.
    """

    name: str
    num_bytes: Sequence[int]
    message: _Message | None = None
    parts_left: set[int] = field(default_factory=set)
    launched_ms: dict[int, float] = field(default_factory=dict)


@dataclass(slots=True)
class _Part:
    """What one rank sends of it; ``remaining_ms`` alone on the wire, negative until it is its turn."""

    whole: _OnWire
    ready_ms: float
    alone_ms: float
    queued_ms: float
    remaining_ms: float = -1.0


class _Port:
    """A rank's end of the wire.

    Attributes:
        next_ms: when something will have been sent if nothing else comes.
        version: counts its changes.
        announced: the version for which there is an event.
    """

    def __init__(self) -> None:
        self.next_ms = _NEVER
        self.version = 0
        self.announced = 0
        self._at_ms = 0.0
        self._flows: list[deque[_Part]] = [deque() for _ in range(_NUM_FLOWS)]
        self._ended_ms = [-_NEVER] * _NUM_FLOWS

    def put(self, flow: int, part: _Part, now_ms: float) -> list[_OnWire]:
        """Takes one; returns what has been sent by now."""
        done = self.advance(now_ms)
        waiting = self._flows[flow]
        waiting.append(part)
        if len(waiting) == 1:  # else it waits for its turn, and changes nothing
            self._schedule()
        return done

    def advance(self, now_ms: float) -> list[_OnWire]:
        """Let time pass; returns what has been sent."""
        passed_ms = now_ms - self._at_ms
        if passed_ms <= 0 and now_ms < self.next_ms:
            return []
        self._at_ms = max(self._at_ms, now_ms)
        active = [flow for flow in self._flows if flow]
        for flow in active:
            flow[0].remaining_ms -= passed_ms / len(active)
        least_ms = min((flow[0].remaining_ms for flow in active), default=0.0)
        sent_ms = max(_DONE_MS, least_ms) if now_ms >= self.next_ms else _DONE_MS
        done = []
        for index, flow in enumerate(self._flows):
            if flow and flow[0].remaining_ms <= sent_ms:
                done.append(flow.popleft().whole)
                self._ended_ms[index] = now_ms
        if done:
            self.version += 1
            self._schedule()
        return done

    def drained_ms(self) -> float:
        """When the wire will be free if nothing else comes."""
        return self._at_ms + sum(
            part.remaining_ms if part.remaining_ms >= 0 else part.queued_ms for flow in self._flows for part in flow
        )

    def _schedule(self) -> None:
        active = [(index, flow[0]) for index, flow in enumerate(self._flows) if flow]
        for index, part in active:
            if part.remaining_ms < 0:  # its turn has come, as Engine._arrival_ms has it
                ends_ms = max(part.ready_ms + part.alone_ms, self._ended_ms[index] + part.queued_ms)
                part.remaining_ms = max(0.0, ends_ms - self._at_ms)
        before_ms = self.next_ms
        least_ms = min((part.remaining_ms for _, part in active), default=_NEVER)
        self.next_ms = self._at_ms + least_ms * len(active) if active else _NEVER
        if self.next_ms != before_ms:
            self.version += 1


class SharedWireEngine(Engine):
    """Plays one phase in which several flows share each rank's wire."""

    def __init__(
        self,
        network: Network,
        steps: Sequence[Step],
        phase: Phase,
        rules: DwRules,
        record: bool,
        buckets: Buckets | None = None,
        paces: Paces = (),
    ) -> None:
        """
        Args:
            buckets: gradients that are reduced beside a backward pass; None for none.
            paces: factors of what the cost model says; empty for none.
        """
        super().__init__(network, steps, phase, rules, record, paces)
        self._buckets = buckets
        self._ports: list[_Port] = []
        self._ledgers: list[Ledger] = []
        self._on_wire: dict[int, _OnWire] = {}
        self._reduced_ms = 0.0

    def run(self, start_ms: Sequence[float]) -> PhaseResult:
        self._ports = [_Port() for _ in start_ms]
        if self._buckets is not None:
            self._ledgers = [Ledger(self._buckets, self._rules) for _ in start_ms]
        result = super().run(start_ms)
        return replace(result, reduced_ms=self._reduced_ms)

    def _go_on(self, rank: _Rank) -> None:
        before = rank.index
        super()._go_on(rank)
        if rank.index == len(self._steps) and (before < rank.index or not self._steps) and self._ledgers:
            while len(rank.queue):
                self._run_dw(rank, rank.queue.take_oldest())
            self._launch(rank, self._ledgers[rank.column].end())

    def _put_all(self, rank: _Rank, layer: int, action: Action) -> None:
        super()._put_all(rank, layer, action)
        if self._ledgers:
            for cost in action.weight_grads[rank.column]:
                self._launch(rank, self._ledgers[rank.column].put((layer, cost.name)))

    def _issue(self, rank: _Rank, key: int, action: Action) -> None:
        if self._ledgers:
            self._ledgers[rank.column].issue()
        super()._issue(rank, key, action)

    def _landed(self, rank: _Rank, message: _Message, layer: int, action: Action) -> None:
        super()._landed(rank, message, layer, action)
        if self._ledgers:
            self._launch(rank, self._ledgers[rank.column].pass_all_to_all(action.kind))

    def _launch(self, rank: _Rank, reductions: Sequence[int]) -> None:
        for index in reductions:
            self._push(rank.time_ms, rank, index, _LAUNCHED)

    def _leave(self, rank: _Rank, key: int, action: Action, time_ms: float) -> None:
        if action is _SERVED:
            if key == self._ports[rank.column].version:
                self._served(rank, self._ports[rank.column].advance(time_ms), time_ms)
        elif action is _LAUNCHED:
            self._launched(rank, key, time_ms)
        else:
            super()._leave(rank, key, action, time_ms)

    def _launched(self, rank: _Rank, index: int, time_ms: float) -> None:
        """A reduction goes onto the wire when the last rank has launched it."""
        assert self._buckets is not None
        reduction = self._buckets.reductions[index]
        sizes = (reduction.num_bytes,) * len(self._ranks)
        whole = self._on_wire.setdefault(index, _OnWire(reduction.name, sizes))
        whole.launched_ms[rank.column] = time_ms
        if len(whole.launched_ms) == len(self._ranks):
            times_ms = (reduction.ms,) * len(self._ranks)
            self._put_on_wire(whole, _FIRST_REDUCTIONS + reduction.kind, time_ms, times_ms, times_ms)

    def _send_parts(self, message: _Message, key: int, action: Action) -> None:
        alone, queued, num_bytes = (
            (action.forward_ms, action.forward_queued_ms, action.forward_bytes)
            if self._is_forward
            else (action.backward_ms, action.backward_queued_ms, action.backward_bytes)
        )
        message.arrival_ms = [_NEVER] * len(self._ranks)
        whole = _OnWire(self._name_of(key, action) if self._record else "", num_bytes, message)
        is_apart = self._network.dispatches_apart and self._is_forward and action.kind == OpKind.DISPATCH
        self._put_on_wire(whole, _DISPATCHES if is_apart else _MESSAGES, message.all_ready_ms, alone, queued)

    def _start_collective(self, key: int, action: Action) -> None:
        self._send_parts(self._messages[key], key, action)

    def _put_on_wire(
        self, whole: _OnWire, flow: int, now_ms: float, alone: Sequence[float], queued: Sequence[float]
    ) -> None:
        whole.parts_left = set(range(len(self._ranks)))
        for rank in self._ranks:
            part = _Part(whole, now_ms, alone[rank.column], queued[rank.column])
            self._served(rank, self._ports[rank.column].put(flow, part, now_ms), now_ms)
        self._land(whole, now_ms)

    def _served(self, rank: _Rank, done: Sequence[_OnWire], now_ms: float) -> None:
        """Parts of ``rank`` have been sent, or something else has changed on its wire."""
        port = self._ports[rank.column]
        rank.link_free_ms = port.drained_ms()
        if port.next_ms < _NEVER and port.announced != port.version:
            port.announced = port.version
            self._push(port.next_ms, rank, port.version, _SERVED)
        for whole in done:
            whole.parts_left.remove(rank.column)
            self._land(whole, now_ms)

    def _land(self, whole: _OnWire, now_ms: float) -> None:
        """On each rank that has all parts of the others now."""
        message = whole.message
        if message is None:
            if not whole.parts_left:
                self._reduced_ms = max(self._reduced_ms, now_ms)
                self._draw(whole, whole.launched_ms, range(len(self._ranks)), now_ms)
            return
        same_ranks = self._network.same_ranks
        landed = [
            column
            for column, number in enumerate(same_ranks)
            if message.arrival_ms[column] == _NEVER
            # A rank without others waits for nothing.
            and not (whole.parts_left if number > 1 else whole.parts_left - {column})
        ]
        for column in landed:
            message.arrival_ms[column] = now_ms
            self._ranks[column].num_unknown -= 1
        for rank in [rank for rank in message.waiting if rank.column in landed]:
            message.waiting.remove(rank)
            self._push(max(rank.time_ms, now_ms), rank)
        self._draw(whole, message.issued_ms, landed, now_ms)

    def _draw(self, whole: _OnWire, start_ms: dict[int, float], columns: Sequence[int], end_ms: float) -> None:
        if self._record:
            for column in columns:
                span = Span(whole.name, Lane.COMM, start_ms[column], end_ms, whole.num_bytes[column])
                self._ranks[column].spans.append(span)

    def _is_known(self, message: _Message, column: int) -> bool:
        return bool(message.arrival_ms) and message.arrival_ms[column] < _NEVER

    def _wait(self, rank: _Rank, key: int, layer: int, action: Action) -> bool:
        if any(port.next_ms <= rank.time_ms for port in self._ports):
            self._push(rank.time_ms, rank)  # what comes now comes before it is waited for
            return False
        return super()._wait(rank, key, layer, action)
