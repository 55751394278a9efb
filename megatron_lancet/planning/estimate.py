"""What a training step is expected to be."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StepEstimate:
    """The figures that every prediction of a step has; who knows more adds fields in a class of its own.

    Attributes:
        step_ms: of the whole step.
        exposed_ms: part of it in which compute waits for all-to-alls: on the rank that waits longest, or where it is
            to be compared with measured steps, mean over ranks.
        peak_bytes: activations and deferred weight gradients of a rank; 0 if not known.
        peak_dw_bytes: the most that deferred weight gradients keep alive on a rank.
    """

    step_ms: float
    exposed_ms: float
    peak_bytes: int = 0
    peak_dw_bytes: int = 0
