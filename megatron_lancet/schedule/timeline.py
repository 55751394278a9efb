"""Timelines of a step, measured or predicted: spans on lanes."""

from dataclasses import dataclass
from enum import StrEnum


class Lane(StrEnum):
    """The resource that a span occupies."""

    COMPUTE = "compute"
    """The thread or stream that computes; its spans don't overlap."""
    WAIT = "wait"
    """The same thread or stream while it waits for a message: exposed communication."""
    COMM = "comm"
    """A message, from its issue to its arrival."""


@dataclass(frozen=True)
class Span:
    """One op.

    Attributes:
        name: an :class:`~megatron_lancet.schedule.ops.Op` as text (``L3.c0.F.experts``), a weight gradient's name
            (``L3.W.self_attention.linear_qkv``) or an op outside the layers (``F.head``). In the wait lane it is the
            message that is waited for.
        start_ms: time since the start of the step.
        end_ms: the same for its end.
        num_bytes: bytes of a message that are sent to other ranks; 0 for other spans.
    """

    name: str
    lane: Lane
    start_ms: float
    end_ms: float
    num_bytes: int = 0

    @property
    def ms(self) -> float:
        """Duration."""
        return self.end_ms - self.start_ms


@dataclass(frozen=True)
class RankTimeline:
    """One step on one rank, spans ordered by start."""

    rank: int
    spans: tuple[Span, ...]
    step_ms: float

    def exposed_ms(self) -> float:
        """Time for which compute waited for messages."""
        return sum(span.ms for span in self.spans if span.lane is Lane.WAIT)
