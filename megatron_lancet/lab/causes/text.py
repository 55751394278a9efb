"""Tables and lines about the causes of waits."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_lancet.lab.causes.attribution import NOTHING_LEFT, UNEXPLAINED, CausePart, StepCauses
from megatron_lancet.lab.causes.changes import Change
from megatron_lancet.lab.causes.replay import Cause

_WORDS = {
    Cause.WIRE: "wire",
    Cause.ROWS: "uneven rows",
    Cause.PACE: "late or slow rank",
    Cause.COUNTS: "token counts",
    Cause.HOST: "host",
    NOTHING_LEFT: "nothing left to run",
    UNEXPLAINED: "unexplained",
}
_SCALED = "parts below 0, where waits would grow without the cause, are shown as 0; the others are scaled to the sum"
_SHOWN_MS = 5e-3
"""A smaller part has no digit in the table."""
_NAMED_SHARE = 0.01
"""Of a step; a cause that takes less says nothing of a rank."""


@dataclass(frozen=True)
class CausesOfStep:
    """Causes of the waits of one traced step.

    Attributes:
        step: its number, as Megatron counts.
        causes: None if they could not be found.
        why_not: why not, as the end of a sentence; None if they were.
    """

    step: int
    causes: StepCauses | None = None
    why_not: str | None = None

    def as_text(self) -> str:
        """Returns a table."""
        if self.causes is None:
            return f"exposed time by cause: none, since {self.why_not}"
        title = f"exposed time by cause, traced step {self.step}, mean over ranks"
        return "\n".join([title, *_table(self.causes)])

    def as_line(self) -> str:
        """Returns one line: all causes that matter, the longest first."""
        if self.causes is None:
            return f"causes of step {self.step}: none, since {self.why_not}"
        found = sorted(shown_parts(self.causes).items(), key=lambda part: -part[1])
        parts = [f"{_WORDS[name]} {ms:.1f}" for name, ms in found if _share(ms, self.causes) >= _NAMED_SHARE]
        causes = self.causes
        head = f"causes of step {self.step}: {causes.exposed_ms:.1f} of {causes.step_ms:.1f} ms exposed"
        return f"{head}: {', '.join(parts)}" if parts else head


def shown_parts(causes: StepCauses) -> dict[str, float]:
    """Parts and rests in ms for readers, none below 0, which sum to the exposed time."""
    parts = {name: max(ms, 0.0) for name, ms in causes.by_name().items()}
    total_ms = sum(parts.values())
    return {name: ms * causes.exposed_ms / total_ms for name, ms in parts.items()} if total_ms else parts


def change_line(change: Change) -> str:
    """Returns the line of a lasting change, with who and what."""
    what = who_and_what(change.cause, change.part) if change.after > change.before else ""
    shares = f"{100 * change.after:.0f} % of a step, {100 * change.before:.0f} % before"
    return f"since step {change.step:,} {what or f'less is waited for because of {_WORDS[change.cause]}'}: {shares}"


def who_and_what(cause: Cause, part: CausePart) -> str:
    """Says who is concerned and how much, as a sentence without its end."""
    match cause:
        case Cause.ROWS:
            return f"rank {part.who} receives {part.size:.2g} times the mean"
        case Cause.PACE:
            return f"rank {part.who} is late or slow, {part.size:.2f} times the mean"
        case Cause.HOST:
            return f"rank {part.who} waits {part.size:.0f} ms of a step for its host"
        case Cause.COUNTS:
            return f"exchanges of token counts take {part.size:.1f} ms of a step"
        case Cause.WIRE:
            return f"a rank sends at {part.size:.0f} Mbit/s"


def _table(causes: StepCauses) -> Sequence[str]:
    lines = [f"  {'cause':<20}{'ms':>9}{'part':>9}{'alone':>9}"]
    for name, ms in shown_parts(causes).items():
        part = causes.parts.get(name)
        alone = "" if part is None else f"{max(part.alone_ms, 0.0):.2f}"
        who = "" if part is None or _share(ms, causes) < _NAMED_SHARE else f"  {who_and_what(Cause(name), part)}"
        lines.append(f"  {_WORDS[name]:<20}{ms:>9.2f}{_percent(ms, causes):>9}{alone:>9}{who}".rstrip())
    lines.append(f"  {'all':<20}{causes.exposed_ms:>9.2f}{_percent(causes.exposed_ms, causes):>9}")
    return [*lines, f"  {_SCALED}"] if min(causes.by_name().values()) < -_SHOWN_MS else lines


def _percent(ms: float, causes: StepCauses) -> str:
    return f"{100 * ms / causes.exposed_ms if causes.exposed_ms else 0.0:.1f} %"


def _share(ms: float, causes: StepCauses) -> float:
    return ms / causes.step_ms if causes.step_ms else 0.0
