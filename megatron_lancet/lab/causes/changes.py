"""Tells when a cause's share of a step changes for good.

A cause's share in the first windows is its reference. It has changed when all of the last windows lie on the same side
of it, farther away than the noise of the reference and than a share worth telling. Then these windows begin the next
reference. So a change is reported once, a few windows after it, and a single outlying window is none.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_lancet.lab.causes.attribution import CausePart, StepCauses
from megatron_lancet.lab.causes.replay import Cause

NUM_REFERENCE = 8
"""Windows before the first change can be reported."""
MAX_REFERENCE = 24
"""More would only be older: later windows are compared with the first ones, so that a slow change is also reported."""
NUM_CHANGED = 4
"""Windows that must agree."""
MIN_SHARE = 0.03
"""Of a step; a smaller change is not reported."""
_NOISES = 5.0
_PER_MAD = 1.4826
"""Standard deviations of a normal distribution in a median of absolute deviations."""


@dataclass(frozen=True)
class Change:
    """A cause's share of a step changed.

    Attributes:
        step: the first step in which it was seen.
        before: share of a step until then, median.
        after: since then, median.
        part: its figures in the last window.
    """

    step: int
    cause: Cause
    before: float
    after: float
    part: CausePart


class Changes:
    """Watches the windows of a run."""

    def __init__(self) -> None:
        self._of_cause = {cause: _Shares() for cause in Cause}

    def add(self, step: int, causes: StepCauses) -> list[Change]:
        """Adds a window; returns what has changed, the largest change first.

        Args:
            step: the traced step.
        """
        found = []
        for cause, shares in self._of_cause.items():
            part = causes.parts[cause]
            shares.add(step, part.ms / causes.step_ms if causes.step_ms else 0.0)
            if shares.have_changed():
                found.append(Change(shares.recent[0][0], cause, *shares.take_medians(), part))
        return sorted(found, key=lambda change: -abs(change.after - change.before))

    def restart(self) -> None:
        """Forgets all windows, because the run changed: another plan."""
        self._of_cause = {cause: _Shares() for cause in Cause}


@dataclass
class _Shares:
    """Shares of one cause: the reference, and the last windows with their steps."""

    reference: list[float] = field(default_factory=list)
    recent: list[tuple[int, float]] = field(default_factory=list)

    def add(self, step: int, share: float) -> None:
        self.recent.append((step, share))
        if len(self.recent) > NUM_CHANGED:
            _, oldest = self.recent.pop(0)
            if len(self.reference) < MAX_REFERENCE:
                self.reference.append(oldest)

    def have_changed(self) -> bool:
        return len(self.reference) >= NUM_REFERENCE and has_changed(self.reference, [share for _, share in self.recent])

    def take_medians(self) -> tuple[float, float]:
        """Medians before and after a change; the windows after it begin the next reference."""
        before, self.reference = statistics.median(self.reference), []
        return before, statistics.median(share for _, share in self.recent)


def has_changed(reference: Sequence[float], recent: Sequence[float]) -> bool:
    """Whether all recent shares are on one side of the reference, and beyond its noise."""
    usual = statistics.median(reference)
    noise = _PER_MAD * statistics.median(abs(share - usual) for share in reference)
    least = max(MIN_SHARE, _NOISES * noise)
    return min(recent) > usual + least or max(recent) < usual - least
