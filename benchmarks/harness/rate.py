"""Finds the link rate at which stock waits for a wanted share of its step."""

_CLOSE_ENOUGH = 0.015
_MIN_BPS, _MAX_BPS = 5e6, 20e9
_MIN_WIRE_MS = 1e-2


class RateSearch:
    """Starts from a run on a free link, and is corrected by runs at the rate that it proposes.

    What is exposed is taken as time on the wire plus a part that does not depend on the rate: the ranks' skew.

    Attributes:
        rate_bps: the present proposal, in bits per second.
        wire_ms: time of a step's bytes on the wire at this rate.
    """

    def __init__(self, share: float, compute_ms: float, free_exposed_ms: float, payload_bytes: float) -> None:
        """
        Args:
            share: wanted exposed share of the step.
            compute_ms: of the step, without what is exposed.
            free_exposed_ms: what is exposed on a free link.
            payload_bytes: sent by a rank in a step.
        """
        self._share = share
        self._bits = payload_bytes * 8
        self.wire_ms = _MIN_WIRE_MS
        self._move_wire(self._wanted_ms(compute_ms) - free_exposed_ms)

    def correct(self, exposed_ms: float, step_ms: float) -> bool:
        """Take in a run at :attr:`rate_bps`. Whether the proposal changed, because the share was not met."""
        if abs(exposed_ms / step_ms - self._share) <= _CLOSE_ENOUGH:
            return False
        self._move_wire(self.wire_ms + self._wanted_ms(step_ms - exposed_ms) - exposed_ms)
        return True

    def _wanted_ms(self, compute_ms: float) -> float:
        return compute_ms * self._share / (1 - self._share)

    def _move_wire(self, wire_ms: float) -> None:
        self.wire_ms = max(wire_ms, _MIN_WIRE_MS)
        self.rate_bps = min(max(self._bits / (self.wire_ms / 1e3), _MIN_BPS), _MAX_BPS)
        self.wire_ms = self._bits / self.rate_bps * 1e3
