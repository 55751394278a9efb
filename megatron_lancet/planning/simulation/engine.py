"""Plays an order of ops on several ranks with two lanes each, compute and link (Lancet section 5.3, for all ranks).

Events are handled in the order of simulated time, so the link sees messages in the order in which they leave:

- *Shared link* (``sends_share_link``): a rank's messages go out one after the other. One goes out when all ranks have
  issued it (gloo sends when the receiver is ready), and has come to a rank when the parts of all others have. A part
  that left behind another comes no earlier than ``queued_ms`` after it, so that a latency counts once in a row of
  messages, and the tokens that a shaped link gathers at rest are spent by the first.
- *Collectives*: one starts when all ranks have issued it and the one before has ended, and takes as long as the
  largest part.

Compute beside a rank's messages, from their issue until they have gone, runs slower by ``compute_slowdown``. Token
counts take no room on the link.
"""

import heapq
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron_lancet.planning.simulation.dw_queue import DwQueue, DwRules, DwTask
from megatron_lancet.planning.simulation.lowering import COMPUTE, COUNTS, ISSUE, Action, Step
from megatron_lancet.schedule.ops import Op, Phase
from megatron_lancet.schedule.timeline import Lane, Span

_SLOTS = 4096
"""Messages of a layer, at most: its number times this, plus the slot, names a message."""
_NEVER = float("inf")

Paces = Sequence[Mapping[int, float]]
"""By simulated rank and layer, factors of the time of compute; layers that are not there run as the profile says."""


@dataclass(frozen=True)
class Network:
    """How messages travel; see :class:`~megatron_lancet.planning.profile.LinkTimes`.

    Attributes:
        same_ranks: by simulated rank, how many ranks of the group behave like it.
    """

    counts_ms: float
    sends_share_link: bool
    compute_slowdown: float
    same_ranks: tuple[int, ...]
    dispatches_apart: bool = False


class Wait(NamedTuple):
    """A place where a rank needed a message.

    Attributes:
        name: of the message.
        start_ms: when it was needed.
        exposed_from_ms: when the rank had nothing left to do; ``end_ms`` if it never stood still.
        end_ms: when the rank went on.
        issued_ms: when this rank issued it.
        sent_ms: when this rank's part could go onto the link.
        peers_ms: when the last rank's part could.
        filled: dWs that ran meanwhile.
    """

    name: str
    start_ms: float
    exposed_from_ms: float
    end_ms: float
    issued_ms: float
    sent_ms: float
    peers_ms: float
    filled: tuple[str, ...]


@dataclass(slots=True)
class _Message:
    num_left: int = 0
    arrival_ms: list[float] = field(default_factory=list)
    all_ready_ms: float = 0.0
    is_known: bool = False
    waiting: list["_Rank"] = field(default_factory=list)
    issued_ms: dict[int, float] = field(default_factory=dict)
    sent_ms: dict[int, float] = field(default_factory=dict)


@dataclass(slots=True)
class _Counts:
    num_issued: int = 0
    done_ms: float = _NEVER
    armed: list[tuple["_Rank", int, Action]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Rank:
    column: int
    time_ms: float
    queue: DwQueue
    index: int = 0
    link_free_ms: float = 0.0
    num_unknown: int = 0
    exposed_ms: float = 0.0
    wait_start_ms: float = -1.0
    planned: list[str] = field(default_factory=list)
    filled: list[str] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)


@dataclass(frozen=True)
class PhaseResult:
    """One phase of a micro-batch, by simulated rank.

    Attributes:
        end_ms: clock at its end.
        exposed_ms: time without anything to compute.
        peak_dw_bytes: the most that deferred dWs kept alive.
        num_early: dWs that ran because their memory was full.
        spans: what ran when; empty unless recorded.
        waits: where messages were needed; empty unless recorded.
        reduced_ms: when the last gradient reduction was done; 0 if there was none.
    """

    end_ms: tuple[float, ...]
    exposed_ms: tuple[float, ...]
    peak_dw_bytes: tuple[int, ...]
    num_early: tuple[int, ...]
    spans: tuple[tuple[Span, ...], ...]
    waits: tuple[tuple[Wait, ...], ...]
    reduced_ms: float = 0.0


class Engine:
    """Plays one phase, forward or backward, of one micro-batch."""

    def __init__(
        self,
        network: Network,
        steps: Sequence[Step],
        phase: Phase,
        rules: DwRules,
        record: bool,
        paces: Paces = (),
    ) -> None:
        """
        Args:
            paces: factors of what the cost model says; empty for none.
        """
        self._network = network
        self._paces = paces
        self._steps = steps
        self._is_forward = phase is Phase.FORWARD
        self._phase = phase
        self._rules = rules
        self._record = record
        self._events: list[tuple[float, int, _Rank, int, Action | None]] = []
        self._num_events = 0
        self._messages: dict[int, _Message] = defaultdict(_Message)
        self._counts: dict[int, _Counts] = defaultdict(_Counts)
        self._collectives: deque[tuple[int, Action]] = deque()
        self._ranks: list[_Rank] = []

    def run(self, start_ms: Sequence[float]) -> PhaseResult:
        """From each rank's clock on."""
        self._ranks = [_Rank(column, clock, DwQueue(self._rules)) for column, clock in enumerate(start_ms)]
        for rank in self._ranks:
            rank.link_free_ms = -_NEVER  # it has rested
            self._push(rank.time_ms, rank)
        events = self._events
        while events:
            time_ms, _, rank, key, action = heapq.heappop(events)
            if action is None:
                self._go_on(rank)
            else:
                self._leave(rank, key, action, time_ms)
        for rank in self._ranks:
            assert rank.index == len(self._steps), "a rank waits for a message that never leaves"
            while len(rank.queue):
                self._run_dw(rank, rank.queue.take_oldest())
        return PhaseResult(
            tuple(rank.time_ms for rank in self._ranks),
            tuple(rank.exposed_ms for rank in self._ranks),
            tuple(rank.queue.peak_bytes for rank in self._ranks),
            tuple(rank.queue.num_early for rank in self._ranks),
            tuple(tuple(rank.spans) for rank in self._ranks),
            tuple(tuple(rank.waits) for rank in self._ranks),
        )

    def _push(self, time_ms: float, rank: _Rank, key: int = 0, action: Action | None = None) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (time_ms, self._num_events, rank, key, action))

    def _go_on(self, rank: _Rank) -> None:
        """Run a rank until it stands still or another event comes first."""
        steps, events, is_forward = self._steps, self._events, self._is_forward
        is_plain = self._network.compute_slowdown <= 1 and not self._record
        column, num_steps, paces = rank.column, len(steps), self._paces
        while rank.index < num_steps:
            code, layer, action = steps[rank.index]
            if code == COMPUTE:
                ms = action.forward_ms[column] if is_forward else action.backward_ms[column]
                if paces:
                    ms *= paces[column].get(layer, 1.0)
                if is_plain:
                    rank.time_ms += ms
                else:
                    self._compute(rank, self._name(layer, action), ms)
                if not is_forward and action.weight_grads[column]:
                    self._put_all(rank, layer, action)
                rank.index += 1
                continue
            if events and events[0][0] < rank.time_ms:
                self._push(rank.time_ms, rank)
                return
            key = layer * _SLOTS + action.slot
            if code == ISSUE:
                self._issue(rank, key, action)
            elif code == COUNTS:
                self._issue_counts(rank, key)
            elif not self._wait(rank, key, layer, action):
                return
            rank.index += 1

    def _name(self, layer: int, action: Action) -> str:
        if layer == 0:
            return str(Op.beside_layers(self._phase, action.kind))
        return str(Op(layer, action.chunk, self._phase, action.kind))

    def _name_of(self, key: int, action: Action) -> str:
        return self._name(key // _SLOTS, action)

    def _compute(self, rank: _Rank, name: str, ms: float) -> None:
        """Let time pass on the compute lane."""
        start_ms, slowdown = rank.time_ms, self._network.compute_slowdown
        if slowdown > 1 and rank.num_unknown:
            ms *= slowdown
        elif slowdown > 1 and rank.link_free_ms > start_ms:
            beside_ms = min(ms * slowdown, rank.link_free_ms - start_ms)
            ms = beside_ms + (ms - beside_ms / slowdown)
        rank.time_ms += ms
        if self._record:
            rank.spans.append(Span(name, Lane.COMPUTE, start_ms, rank.time_ms))

    def _put_all(self, rank: _Rank, layer: int, action: Action) -> None:
        for cost in action.weight_grads[rank.column]:
            if not self._rules.defers:
                self._run_dw(rank, DwTask(layer, cost, 0))
                continue
            for task in rank.queue.put(layer, cost):
                self._run_dw(rank, task)

    def _run_dw(self, rank: _Rank, task: DwTask) -> None:
        ms = task.cost.ms
        if self._paces:
            ms *= self._paces[rank.column].get(task.layer, 1.0)
        if self._record or self._network.compute_slowdown > 1:
            self._compute(rank, task.name, ms)
        else:
            rank.time_ms += ms

    def _issue_counts(self, rank: _Rank, key: int) -> None:
        counts = self._counts[key]
        counts.num_issued += 1
        if counts.num_issued == len(self._ranks):
            counts.done_ms = rank.time_ms + self._network.counts_ms
            for armed, armed_key, action in counts.armed:
                self._push(counts.done_ms, armed, armed_key, action)

    def _issue(self, rank: _Rank, key: int, action: Action) -> None:
        """A message leaves now, or is armed until its counts have come."""
        message = self._messages[key]
        message.issued_ms[rank.column] = rank.time_ms
        rank.num_unknown += 1
        if not self._network.sends_share_link and len(message.issued_ms) == 1:
            self._collectives.append((key, action))
        counts = self._counts.get(key)
        if counts is None or counts.done_ms <= rank.time_ms:
            self._leave(rank, key, action, rank.time_ms)
        elif counts.done_ms == _NEVER:
            counts.armed.append((rank, key, action))
        else:
            self._push(counts.done_ms, rank, key, action)

    def _leave(self, rank: _Rank, key: int, action: Action, time_ms: float) -> None:
        message = self._messages[key]
        message.num_left += 1
        message.all_ready_ms = max(message.all_ready_ms, time_ms)
        message.sent_ms[rank.column] = max(time_ms, rank.link_free_ms)
        if not self._network.sends_share_link:
            while self._collectives and self._messages[self._collectives[0][0]].num_left == len(self._ranks):
                self._start_collective(*self._collectives.popleft())
        elif message.num_left == len(self._ranks):
            self._send_parts(message, key, action)

    def _send_parts(self, message: _Message, key: int, action: Action) -> None:
        """Every rank's part goes onto its own link."""
        ready_ms, same_ranks = message.all_ready_ms, self._network.same_ranks
        free_ms = []
        for rank in self._ranks:
            rank.link_free_ms = self._arrival_ms(rank, action, ready_ms)
            free_ms.append(rank.link_free_ms)
        if same_ranks == (1, 1):  # the same, written out: planning spends much of its time here
            message.arrival_ms = free_ms[::-1]
        else:
            message.arrival_ms = [
                # A rank without others waits for nothing.
                max([ready_ms, *(free for other, free in enumerate(free_ms) if other != column or number > 1)])
                for column, number in enumerate(same_ranks)
            ]
        self._arrives(message, key, action)

    def _arrival_ms(self, rank: _Rank, action: Action, time_ms: float) -> float:
        """Of a rank's part of a message that leaves at ``time_ms``, behind what the rank has sent before."""
        alone, queued = (
            (action.forward_ms, action.forward_queued_ms)
            if self._is_forward
            else (action.backward_ms, action.backward_queued_ms)
        )
        return max(time_ms + alone[rank.column], rank.link_free_ms + queued[rank.column])

    def _start_collective(self, key: int, action: Action) -> None:
        message = self._messages[key]
        sent_ms = max(message.all_ready_ms, self._ranks[0].link_free_ms)
        arrival_ms = self._arrival_ms(self._ranks[0], action, message.all_ready_ms)  # all parts are equal
        message.arrival_ms = [arrival_ms] * len(self._ranks)
        for rank in self._ranks:
            rank.link_free_ms = arrival_ms
            message.sent_ms[rank.column] = sent_ms
        self._arrives(message, key, action)

    def _arrives(self, message: _Message, key: int, action: Action) -> None:
        message.is_known = True
        for rank in self._ranks:
            rank.num_unknown -= 1
        for rank in message.waiting:
            self._push(max(rank.time_ms, message.arrival_ms[rank.column]), rank)
        if self._record:
            num_bytes = action.forward_bytes if self._is_forward else action.backward_bytes
            name = self._name_of(key, action)
            for rank in self._ranks:
                issued_ms, sent = message.issued_ms[rank.column], num_bytes[rank.column]
                rank.spans.append(Span(name, Lane.COMM, issued_ms, message.arrival_ms[rank.column], sent))

    def _wait(self, rank: _Rank, key: int, layer: int, action: Action) -> bool:
        """Whether the message is there; dWs run until it is. If not, the rank will be called again."""
        message = self._messages[key]
        if rank.wait_start_ms < 0:
            rank.wait_start_ms = rank.time_ms
            if self._rules.gaps and not self._is_forward:
                rank.planned = list(self._rules.gaps.get(self._name(layer, action), ()))
        while not (self._is_known(message, rank.column) and message.arrival_ms[rank.column] <= rank.time_ms):
            task = self._next_dw(rank)
            if task is None:
                break
            self._run_dw(rank, task)
            if self._record:
                rank.filled.append(task.name)
            is_known = self._is_known(message, rank.column)
            if not is_known and self._events and self._events[0][0] < rank.time_ms:
                self._push(rank.time_ms, rank)
                return False
        if not self._is_known(message, rank.column):
            message.waiting.append(rank)
            return False
        self._landed(rank, message, layer, action)
        return True

    def _is_known(self, message: _Message, column: int) -> bool:
        """Whether it is known when the message comes to the rank."""
        return message.is_known

    def _next_dw(self, rank: _Rank) -> DwTask | None:
        """The gap's planned dWs first, in their order, then the oldest."""
        while rank.planned:
            task = rank.queue.take(rank.planned.pop(0))
            if task is not None:
                return task
        return rank.queue.take_oldest() if len(rank.queue) else None

    def _landed(self, rank: _Rank, message: _Message, layer: int, action: Action) -> None:
        exposed_from_ms = rank.time_ms
        rank.time_ms = max(rank.time_ms, message.arrival_ms[rank.column])
        rank.exposed_ms += rank.time_ms - exposed_from_ms
        if self._record:
            name = self._name(layer, action)
            if rank.time_ms > exposed_from_ms:
                rank.spans.append(Span(name, Lane.WAIT, exposed_from_ms, rank.time_ms))
            sent_ms = message.sent_ms[rank.column]
            peers_ms = max(message.sent_ms.values())
            issued_ms = message.issued_ms[rank.column]
            times = (rank.wait_start_ms, exposed_from_ms, rank.time_ms, issued_ms, sent_ms, peers_ms)
            rank.waits.append(Wait(name, *times, tuple(rank.filled)))
            rank.filled.clear()
        rank.wait_start_ms = -1.0
        rank.planned = []
        if not self._is_forward:
            for task in rank.queue.pass_all_to_all():
                self._run_dw(rank, task)
