"""Links that several transfers share in equal parts (processor sharing).

Transfers over the same connections or the same stream are a *flow* and are sent one after the other: all-to-alls,
reductions of dense gradients, reductions of expert gradients, and with ``dispatches_apart`` the forward dispatches that
wait for counts. While n flows are active, each transfer takes n times as long as alone. With one flow the times are the
rules of :class:`~megatron_lancet.planning.simulation.links.SerialLinks`. Of two hops only the messages between nodes
share these links: gradients are summed by ranks of several nodes.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_lancet.planning.simulation.buckets import Reduction
from megatron_lancet.planning.simulation.links import (
    NEVER,
    Clock,
    InOrder,
    LaunchReduction,
    LinkEvent,
    Links,
    Message,
    Network,
    PartSent,
)
from megatron_lancet.schedule.ops import FIRST_DISPATCHES

_DONE_MS = 1e-9
"""Largest remaining time of a part that counts as sent (rounding)."""
_NUM_FLOWS = 4
_MESSAGES, _DISPATCHES, _FIRST_REDUCTIONS = 0, 1, 2


@dataclass(slots=True, eq=False)
class _Transfer:
    """A message or a reduction on the links; the parts of ranks end at different times.

    Attributes:
        launched_ms: launch time of a reduction by column; empty for a message.
        parts_left: columns whose part has not been sent.
    """

    what: Message | Reduction
    launched_ms: dict[int, float] = field(default_factory=dict)
    parts_left: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Part:
    """One rank's part of a transfer; ``remaining_ms`` is its time alone on the link, negative until it is first."""

    transfer: _Transfer
    ready_ms: float
    alone_ms: float
    queued_ms: float
    remaining_ms: float = -1.0


class _Port:
    """A rank's end of its link.

    Attributes:
        next_ms: when the next part will have been sent if no other is added.
        version: number of changes of ``next_ms``.
        announced: the version for which there is an event.
    """

    def __init__(self) -> None:
        self.next_ms = NEVER
        self.version = 0
        self.announced = 0
        self._at_ms = 0.0
        self._flows: list[deque[_Part]] = [deque() for _ in range(_NUM_FLOWS)]
        self._ended_ms = [-NEVER] * _NUM_FLOWS

    def put(self, flow: int, part: _Part, now_ms: float) -> list[_Transfer]:
        """Adds a part; returns the transfers whose parts have been sent by now."""
        done = self.advance(now_ms)
        waiting = self._flows[flow]
        waiting.append(part)
        if len(waiting) == 1:  # else it waits behind others, and ``next_ms`` stays
            self._schedule()
        return done

    def advance(self, now_ms: float) -> list[_Transfer]:
        """Advances the clock; returns the transfers whose parts have been sent."""
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
                done.append(flow.popleft().transfer)
                self._ended_ms[index] = now_ms
        if done:
            self.version += 1
            self._schedule()
        return done

    def drained_ms(self) -> float:
        """When the link will be idle if no other part is added."""
        return self._at_ms + sum(
            part.remaining_ms if part.remaining_ms >= 0 else part.queued_ms for flow in self._flows for part in flow
        )

    def _schedule(self) -> None:
        active = [(index, flow[0]) for index, flow in enumerate(self._flows) if flow]
        for index, part in active:
            if part.remaining_ms < 0:  # it is first now; the formula is SerialLinks'
                ends_ms = max(part.ready_ms + part.alone_ms, self._ended_ms[index] + part.queued_ms)
                part.remaining_ms = max(0.0, ends_ms - self._at_ms)
        before_ms = self.next_ms
        least_ms = min((part.remaining_ms for _, part in active), default=NEVER)
        self.next_ms = self._at_ms + least_ms * len(active) if active else NEVER
        if self.next_ms != before_ms:
            self.version += 1


class SharedLinks(Links):
    """Links that several flows share."""

    def __init__(self, network: Network) -> None:
        super().__init__(network)
        self._num_ranks = len(network.same_ranks)
        self._ports = [_Port() for _ in network.same_ranks]
        self._order = None if network.sends_share_link else InOrder()
        self._reductions: dict[str, _Transfer] = {}

    def send(self, message: Message, clock: Clock) -> None:
        for released in [message] if self._order is None else self._order.release(message):
            is_apart = self.network.dispatches_apart and released.is_forward and released.kind in FIRST_DISPATCHES
            flow = _DISPATCHES if is_apart else _MESSAGES
            self._put(_Transfer(released), flow, released.ready_ms, released.alone_ms, released.queued_ms, clock)

    def advance(self, time_ms: float, event: LinkEvent, clock: Clock) -> None:
        match event:
            case PartSent(column, version):
                port = self._ports[column]
                if version == port.version:
                    self._sent(column, port.advance(time_ms), time_ms, clock)
            case LaunchReduction(column, reduction):
                self._launch(column, reduction, time_ms, clock)

    def _launch(self, column: int, reduction: Reduction, time_ms: float, clock: Clock) -> None:
        """Sends a reduction when the last rank has launched it."""
        transfer = self._reductions.setdefault(reduction.name, _Transfer(reduction))
        transfer.launched_ms[column] = time_ms
        if len(transfer.launched_ms) == self._num_ranks:
            times_ms = (reduction.ms,) * self._num_ranks
            self._put(transfer, _FIRST_REDUCTIONS + reduction.kind, time_ms, times_ms, times_ms, clock)

    def _put(
        self,
        transfer: _Transfer,
        flow: int,
        now_ms: float,
        alone_ms: Sequence[float],
        queued_ms: Sequence[float],
        clock: Clock,
    ) -> None:
        transfer.parts_left = set(range(self._num_ranks))
        for column, port in enumerate(self._ports):
            part = _Part(transfer, now_ms, alone_ms[column], queued_ms[column])
            self._sent(column, port.put(flow, part, now_ms), now_ms, clock)
        self._end(transfer, now_ms, clock)

    def _sent(self, column: int, done: Sequence[_Transfer], now_ms: float, clock: Clock) -> None:
        """Handles a change of a rank's link; its parts of ``done`` have been sent."""
        port = self._ports[column]
        self.free_ms[column] = port.drained_ms()
        self.next_ms = min(port.next_ms for port in self._ports)
        if port.next_ms < NEVER and port.announced != port.version:
            port.announced = port.version
            clock.call_at(port.next_ms, PartSent(column, port.version))
        for transfer in done:
            transfer.parts_left.remove(column)
            self._end(transfer, now_ms, clock)

    def _end(self, transfer: _Transfer, now_ms: float, clock: Clock) -> None:
        """Ends a transfer on each rank that has all parts from others now."""
        what, parts_left = transfer.what, transfer.parts_left
        if isinstance(what, Reduction):
            if not parts_left:
                clock.reduce(what, [transfer.launched_ms[column] for column in range(self._num_ranks)], now_ms)
            return
        reached = [
            column
            for column, number in enumerate(self.network.same_ranks)
            if what.arrival_ms[column] == NEVER
            # A single rank waits for nothing.
            and not (parts_left if number > 1 else parts_left - {column})
        ]
        for column in reached:
            what.arrival_ms[column] = now_ms
        clock.arrive(what, reached)
