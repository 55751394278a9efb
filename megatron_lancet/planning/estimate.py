"""Estimated figures of a training step."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StepEstimate:
    """The figures that all predictions of a step have; subclasses add others.

    Attributes:
        step_ms: time of the whole step.
        exposed_ms: time for which compute waits for all-to-alls, on the rank that waits longest; the mean over ranks if
            it is compared with measured steps.
        peak_bytes: activations and deferred weight gradients of a rank; 0 if unknown.
        peak_dw_bytes: most memory that deferred weight gradients keep alive on a rank.
    """

    step_ms: float
    exposed_ms: float
    peak_bytes: int = 0
    peak_dw_bytes: int = 0
