"""The state of a simulated rank, of its host, and of an exchange of token counts, for the engine.

A device's host enqueues ops, and is ahead of the device until it needs token counts: before it launches the next
collective, or when the dispatch is waited for (``runtime/comm.py``). It stops there until they have arrived, which
includes its own round trip to the device. The device continues with what was enqueued before; then it is idle, since
all later ops are enqueued after that time. Launching takes the times in the profile: an op ends when the device has run
it, and not before the host has launched all of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from megatron_lancet.planning.simulation.buckets import Ledger, Weight
from megatron_lancet.planning.simulation.cost_model import DwCost
from megatron_lancet.planning.simulation.links import NEVER, Links, Message
from megatron_lancet.planning.simulation.lowering import BESIDE, Action, Step, counts_key, key_of
from megatron_lancet.planning.simulation.phase_result import Mark, PhaseResult, Wait
from megatron_lancet.schedule.dw_queue import DwQueue, DwRules
from megatron_lancet.schedule.timeline import Lane, Span
from megatron_lancet.schedule.turns import Compute, Launch, LaunchCounts
from megatron_lancet.schedule.turns import Wait as WaitFor


class LayerDw(NamedTuple):
    """A dW with its layer (0 outside the layers) and cost."""

    layer: int
    cost: DwCost

    @property
    def name(self) -> str:
        """The name in plans and timelines."""
        return f"L{self.layer}.W.{self.cost.name}" if self.layer else f"W.{self.cost.name}"

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its weights, for the queue of dWs."""
        return (self.name,)


@dataclass(slots=True)
class CountsState:
    """An exchange of token counts.

    Attributes:
        waiting: messages whose size it tells, each with the time before which the rank's host can't launch it.
        stopped: ranks whose hosts wait for it.
    """

    issued_ms: dict[int, float] = field(default_factory=dict)
    done_ms: float = NEVER
    waiting: list[tuple["RankState", Message, float]] = field(default_factory=list)
    stopped: list["RankState"] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class RankState:
    """A simulated rank: its clock, its place in the steps, and what it has recorded."""

    column: int
    time_ms: float
    queue: DwQueue[LayerDw, Weight]
    ledger: Ledger | None = None
    index: int = 0
    num_ended: int = 0
    """Number of backwards that have ended."""
    pending: int | None = None
    """Key of the last dispatch that the host has not launched yet; the only one if counts are also in the order."""
    num_unknown: int = 0
    slowed_until_ms: float = 0.0
    """Up to when compute during messages is known to be slowed down, or nothing was computed."""
    host_ms: float = 0.0
    """Up to when the host has launched what the device runs; the device's time is never before it."""
    exposed_ms: float = 0.0
    exposed_forward_ms: float = 0.0
    peak_dw_bytes: int = 0
    num_early: int = 0
    marks: list[Mark] = field(default_factory=list)
    wait_start_ms: float = -1.0
    filled: list[str] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.host_ms = self.time_ms

    def compute(self, name: str, ms: float, slowdown: float, busy_until_ms: float) -> None:
        """Advances the clock by a compute op.

        Args:
            name: of the op; empty to record nothing.
            slowdown: of the part that runs while the rank's links are busy.
            busy_until_ms: when the links will all be idle if no more is sent.
        """
        start_ms = self.time_ms
        if slowdown > 1 and busy_until_ms > start_ms:
            beside_ms = min(ms * slowdown, busy_until_ms - start_ms)
            ms = beside_ms + (ms - beside_ms / slowdown)
            self.slowed_until_ms = max(self.slowed_until_ms, start_ms + beside_ms)
        self.time_ms = max(self.time_ms + ms, self.host_ms)
        if name:
            self.spans.append(Span(name, Lane.COMPUTE, start_ms, self.time_ms))

    def end_backward(self, rules: Sequence[DwRules]) -> None:
        """Ends a backward whose dWs have run.

        Args:
            rules: of the dWs of each backward, in order.
        """
        self.peak_dw_bytes = max(self.peak_dw_bytes, self.queue.peak_bytes)
        self.num_early = max(self.num_early, self.queue.num_early)
        self.num_ended += 1
        self.marks.append(Mark(self.time_ms, self.exposed_ms, self.exposed_forward_ms))
        if self.num_ended < len(rules):
            self.queue = DwQueue(rules[self.num_ended])

    def slow_past_compute(self, message: Message, slowdown: float, record: bool) -> None:
        """Delays it by the slowdown of ops that ran during a message before this was known to be sent."""
        from_ms, sent_ms = max(message.ready_ms, self.slowed_until_ms), message.arrival_ms[self.column]
        if from_ms < min(self.time_ms, sent_ms):
            more = slowdown - 1
            self.time_ms += min((self.time_ms - from_ms) * more, (sent_ms - from_ms) * more / slowdown)
            self.slowed_until_ms = min(self.time_ms, sent_ms)
            if record:
                self.prolong_compute()

    def get_counts(self, done_ms: float, launch_ms: float) -> None:
        """Lets the host go on when it has token counts, and launch their message."""
        self.host_ms = max(self.host_ms, done_ms) + launch_ms
        self.time_ms = max(self.time_ms, self.host_ms)

    def prolong_compute(self) -> None:
        """Makes the last span of compute end now."""
        last = max(index for index, span in enumerate(self.spans) if span.lane is Lane.COMPUTE)
        self.spans[last] = replace(self.spans[last], end_ms=self.time_ms)

    def receive(self, message: Message, name: str) -> None:
        """Ends a wait for a message that has arrived.

        Args:
            name: of the message; empty to record nothing.
        """
        exposed_from_ms = self.time_ms
        self.time_ms = max(self.time_ms, message.arrival_ms[self.column])
        self.exposed_ms += self.time_ms - exposed_from_ms
        if self.time_ms > exposed_from_ms:
            self.slowed_until_ms = self.time_ms  # nothing was computed meanwhile
        if message.is_forward:
            self.exposed_forward_ms += self.time_ms - exposed_from_ms
        if name:
            self._record_wait(name, message, exposed_from_ms)
        self.wait_start_ms = -1.0

    def end_wait_for_counts(self, counts: CountsState, idle_from_ms: float, name: str) -> None:
        """Ends a wait of the host for token counts, in which the device had nothing to run.

        Args:
            name: of the counts; empty to record nothing.
        """
        self.time_ms = self.slowed_until_ms = max(self.time_ms, counts.done_ms)
        self.exposed_ms += self.time_ms - idle_from_ms
        self.exposed_forward_ms += self.time_ms - idle_from_ms  # there are no counts in the backward
        if name:
            self._record_wait_for_counts(name, counts, idle_from_ms)

    def _record_wait(self, name: str, message: Message, exposed_from_ms: float) -> None:
        """Records a wait for a message that ends now."""
        if self.time_ms > exposed_from_ms:
            self.spans.append(Span(name, Lane.WAIT, exposed_from_ms, self.time_ms))
        issued_ms, sent_ms = message.issued_ms[self.column], message.sent_ms[self.column]
        times = (self.wait_start_ms, exposed_from_ms, self.time_ms, issued_ms, sent_ms, max(message.sent_ms))
        self.waits.append(Wait(name, *times, tuple(self.filled)))
        self.filled.clear()

    def _record_wait_for_counts(self, name: str, counts: CountsState, idle_from_ms: float) -> None:
        """Records a wait of the host for token counts that ends now."""
        self.spans.append(Span(name, Lane.WAIT, idle_from_ms, self.time_ms))
        issued_ms, peers_ms = counts.issued_ms[self.column], max(counts.issued_ms.values())
        self.waits.append(Wait(name, idle_from_ms, idle_from_ms, self.time_ms, issued_ms, issued_ms, peers_ms, ()))


def phase_result(ranks: Sequence[RankState], reduced_ms: float) -> PhaseResult:
    """The result of a phase that has ended on all ranks.

    Args:
        reduced_ms: when the last gradient reduction ended; 0 if there was none.
    """
    return PhaseResult(
        tuple(rank.time_ms for rank in ranks),
        tuple(rank.exposed_ms for rank in ranks),
        tuple(max(rank.peak_dw_bytes, rank.queue.peak_bytes) for rank in ranks),
        tuple(max(rank.num_early, rank.queue.num_early) for rank in ranks),
        tuple(tuple(rank.spans) for rank in ranks),
        tuple(tuple(rank.waits) for rank in ranks),
        reduced_ms,
        tuple(rank.exposed_forward_ms for rank in ranks),
        tuple(tuple(rank.marks) for rank in ranks),
    )


def new_message(links: Links, place: int, action: Action, is_forward: bool) -> Message:
    """A message of a step, of which no rank has issued its part yet."""
    alone_ms, queued_ms, num_bytes = (
        (action.forward_ms, action.forward_queued_ms, action.forward_bytes)
        if is_forward
        else (action.backward_ms, action.backward_queued_ms, action.backward_bytes)
    )
    num_ranks = len(links.free_ms)
    links.num_messages += 1
    return Message(
        links,
        links.num_messages - 1,
        place,
        is_forward,
        action.kind,
        action.chunk,
        action.tile,
        alone_ms,
        queued_ms,
        num_bytes,
        [NEVER] * num_ranks,
        [0.0] * num_ranks,
        [0.0] * num_ranks,
    )


def launched_after_ms(rank: RankState, steps: Sequence[Step], is_forward: bool) -> float:
    """The time before which a device's host can't launch the dispatch that the rank has just issued.

    It launches that before the next collective, or where the dispatch is waited for (``runtime/comm.py``), so behind
    the ops in front of it.
    """
    assert rank.pending is not None
    own_counts, host_ms = counts_key(rank.pending), rank.host_ms
    for verb, place, action in steps[rank.index + 1 :]:
        if verb is Compute:
            host_ms += action.forward_host_ms if is_forward or place & BESIDE else action.backward_host_ms
            continue
        is_own = verb in (Launch, WaitFor) and counts_key(key_of(place, action)) == own_counts
        if verb is LaunchCounts or (verb is Launch and not is_own) or (verb is WaitFor and is_own):
            break
    return host_ms
