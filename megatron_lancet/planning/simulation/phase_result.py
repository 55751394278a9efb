"""The engine's results of one phase, forward or backward, of a micro-batch."""

from dataclasses import dataclass
from typing import NamedTuple

from megatron_lancet.schedule.plan import Plan
from megatron_lancet.schedule.timeline import Span


class Wait(NamedTuple):
    """A rank's wait for a message, or its host's wait for token counts.

    Attributes:
        name: name of the message or of the counts.
        start_ms: when the rank needed the message.
        exposed_from_ms: when the rank had no work left; ``end_ms`` if it had work all the time.
        end_ms: when the rank continued.
        issued_ms: when this rank issued the message.
        sent_ms: when this rank's part could be sent.
        peers_ms: when the last rank's part could be sent.
        filled: names of the dWs that ran during the wait.
    """

    name: str
    start_ms: float
    exposed_from_ms: float
    end_ms: float
    issued_ms: float
    sent_ms: float
    peers_ms: float
    filled: tuple[str, ...]


class Mark(NamedTuple):
    """A rank's figures at the end of a backward that is followed by another.

    Attributes:
        end_ms: clock.
        exposed_ms: time without work to do, from the start of the first backward on.
        exposed_forward_ms: the part of it in which a forward waits.
    """

    end_ms: float
    exposed_ms: float
    exposed_forward_ms: float


@dataclass(frozen=True)
class PhaseResult:
    """The result of one phase of a micro-batch, or of backwards with forwards paired with them, by column.

    Attributes:
        end_ms: clock at the end.
        exposed_ms: time without work to do.
        peak_dw_bytes: most memory that deferred dWs kept alive.
        num_early: number of dWs that ran because memory was full.
        spans: ops and messages; empty unless recorded.
        waits: waits for messages; empty unless recorded.
        reduced_ms: when the last gradient reduction ended; 0 if there was none.
        exposed_forward_ms: the part of ``exposed_ms`` in which a forward waits.
        marks: figures at the end of each backward that has a forward paired with it.
    """

    end_ms: tuple[float, ...]
    exposed_ms: tuple[float, ...]
    peak_dw_bytes: tuple[int, ...]
    num_early: tuple[int, ...]
    spans: tuple[tuple[Span, ...], ...]
    waits: tuple[tuple[Wait, ...], ...]
    reduced_ms: float = 0.0
    exposed_forward_ms: tuple[float, ...] = ()
    marks: tuple[tuple[Mark, ...], ...] = ()


@dataclass(frozen=True)
class MicroBatchKind:
    """Micro-batches of a step that run alike.

    Attributes:
        plan: the plan by which they run, without pairing.
        waits: waits of one of them, by timeline.
        num_times: how many of them a step has.
        is_at_end: whether they are at the ends of a step with pairing.
    """

    plan: Plan
    waits: tuple[tuple[Wait, ...], ...]
    num_times: int
    is_at_end: bool = False
