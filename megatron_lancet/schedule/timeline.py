"""What happened, or will happen, when: spans on lanes, measured or predicted."""

from dataclasses import dataclass
from enum import StrEnum


class Lane(StrEnum):
    """Where a span lies."""

    COMPUTE = "compute"
    """The thread or stream that computes. Spans of it do not overlap."""
    WAIT = "wait"
    """The same thread or stream, standing still: exposed communication."""
    COMM = "comm"
    """A message, from when it is issued to when it has come."""


@dataclass(frozen=True)
class Span:
    """One op.

    Attributes:
        name: an :class:`~megatron_lancet.schedule.ops.Op` as text (``L3.c0.F.experts``), a weight gradient's name
            (``L3.W.self_attention.linear_qkv``) or an op beside the layers (``F.head``). In the wait lane the message
            that is waited for.
        start_ms: from the beginning of the step.
        num_bytes: of a message, sent to others; 0 for the rest.
    """

    name: str
    lane: Lane
    start_ms: float
    end_ms: float
    num_bytes: int = 0

    @property
    def ms(self) -> float:
        """How long it took."""
        return self.end_ms - self.start_ms


@dataclass(frozen=True)
class RankTimeline:
    """One step on one rank, spans ordered by start."""

    rank: int
    spans: tuple[Span, ...]
    step_ms: float

    def exposed_ms(self) -> float:
        """Time in which compute stood still for a message."""
        return sum(span.ms for span in self.spans if span.lane is Lane.WAIT)
