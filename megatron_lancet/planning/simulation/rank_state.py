"""The state of a simulated rank and of an exchange of token counts, for the engine."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from megatron_lancet.planning.simulation.buckets import Ledger, Weight
from megatron_lancet.planning.simulation.cost_model import DwCost
from megatron_lancet.planning.simulation.links import NEVER, Message
from megatron_lancet.planning.simulation.phase_result import Mark, PhaseResult, Wait
from megatron_lancet.schedule.dw_queue import DwQueue
from megatron_lancet.schedule.timeline import Lane, Span


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

    def record_wait(self, name: str, message: Message, exposed_from_ms: float) -> None:
        """Records a wait for a message that ends now."""
        if self.time_ms > exposed_from_ms:
            self.spans.append(Span(name, Lane.WAIT, exposed_from_ms, self.time_ms))
        issued_ms, sent_ms = message.issued_ms[self.column], message.sent_ms[self.column]
        times = (self.wait_start_ms, exposed_from_ms, self.time_ms, issued_ms, sent_ms, max(message.sent_ms))
        self.waits.append(Wait(name, *times, tuple(self.filled)))
        self.filled.clear()

    def record_wait_for_counts(self, name: str, counts: CountsState, idle_from_ms: float) -> None:
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
