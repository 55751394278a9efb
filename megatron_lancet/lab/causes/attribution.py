"""Divides the exposed time of a traced step among its causes.

The step is replayed as it was, then causes are removed one after the other, in a fixed order: rows, host, pace, counts,
wire. The part of a cause is the exposed time that goes when it is removed. So the first parts say what other routing, a
free host and punctual ranks would save; what the wire costs is what even and punctual ranks would still wait for. What
is left with all removed is *nothing left to run*: ranks whose ops lie in another order wait for each other on any link.
Where the replay of the step as it was has more or less waits than the step, the difference is *unexplained*. All of
them sum to the measured exposed time.

A wait that ends late for two reasons, each of which is enough, counts for the reason that is removed later. What goes
if only one cause goes is reported apart (``alone_ms``); these values have no meaningful sum.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_lancet.lab.causes.program import Programs
from megatron_lancet.lab.causes.replay import Cause, Step
from megatron_lancet.lab.causes.traced import TracedRank
from megatron_lancet.lab.causes.wire import LinkKind

REMOVAL_ORDER = (Cause.ROWS, Cause.HOST, Cause.PACE, Cause.COUNTS, Cause.WIRE)
NOTHING_LEFT, UNEXPLAINED = "nothing_left_to_run", "unexplained"


@dataclass(frozen=True)
class CausePart:
    """The cost of one cause.

    Attributes:
        ms: its part of the exposed time of a step, mean over ranks; below 0 where its removal makes ranks wait longer.
        alone_ms: exposed time that goes if it alone goes.
        who: the global rank that is most concerned; None for causes of no one rank.
        size: how much: rows, or pace, of that rank over the mean; ms of a step for counts and for the host; Mbit/s of
            the link.
    """

    ms: float
    alone_ms: float
    who: int | None = None
    size: float = 0.0


@dataclass(frozen=True)
class StepCauses:
    """Exposed time of one traced step by cause, mean over ranks.

    Attributes:
        step_ms: of the slowest rank.
        exposed_ms: measured; the sum of all parts and the two rests.
        parts: by cause.
        nothing_left_ms: what is exposed with all causes removed.
        unexplained_ms: measured beyond what the replay of the step as it was has.
    """

    step_ms: float
    exposed_ms: float
    parts: dict[str, CausePart]
    nothing_left_ms: float
    unexplained_ms: float

    def by_name(self) -> dict[str, float]:
        """All parts and rests in ms, which sum to ``exposed_ms``."""
        parts = {str(cause): part.ms for cause, part in self.parts.items()}
        return {**parts, NOTHING_LEFT: self.nothing_left_ms, UNEXPLAINED: self.unexplained_ms}


def causes_of(ranks: Sequence[TracedRank], kind: LinkKind) -> StepCauses:
    """Returns the causes of the waits of a step.

    Args:
        ranks: all ranks of an expert-parallel group in its order, on one clock.

    Raises:
        CannotReplay: the traces don't belong to one step of one group.
    """
    step = Step(ranks, kind)
    as_it_was_ms = left_ms = step.replay()
    parts: dict[str, CausePart] = {}
    removed: frozenset[Cause] = frozenset()
    for cause in REMOVAL_ORDER:
        removed |= {cause}
        before_ms, left_ms = left_ms, step.replay(removed)
        without_ms = left_ms if len(removed) == 1 else step.replay(frozenset({cause}))
        parts[cause] = CausePart(before_ms - left_ms, as_it_was_ms - without_ms, *_size(cause, step))
    return StepCauses(
        step_ms=max(rank.timeline.step_ms for rank in ranks),
        exposed_ms=step.exposed_ms,
        parts={cause: parts[cause] for cause in Cause},
        nothing_left_ms=left_ms,
        unexplained_ms=step.exposed_ms - as_it_was_ms,
    )


def merged(groups: Sequence[StepCauses]) -> StepCauses:
    """Means over expert-parallel groups; the ranks named are of the group in which the cause costs most.

    Args:
        groups: causes of the same step, at least one.
    """

    def part(cause: Cause) -> CausePart:
        parts = [group.parts[cause] for group in groups]
        worst = max(parts, key=lambda one: one.ms)
        alone_ms = statistics.fmean(one.alone_ms for one in parts)
        return CausePart(statistics.fmean(one.ms for one in parts), alone_ms, worst.who, worst.size)

    return StepCauses(
        step_ms=max(group.step_ms for group in groups),
        exposed_ms=statistics.fmean(group.exposed_ms for group in groups),
        parts={cause: part(cause) for cause in Cause},
        nothing_left_ms=statistics.fmean(group.nothing_left_ms for group in groups),
        unexplained_ms=statistics.fmean(group.unexplained_ms for group in groups),
    )


def _size(cause: Cause, step: Step) -> tuple[int | None, float]:
    """Who is most concerned, and how much; see :class:`CausePart`."""
    ranks, programs = step.ranks, step.programs
    match cause:
        case Cause.ROWS:
            return _most(ranks, [sum(sum(rows) for rows in (rank.received_rows or {}).values()) for rank in ranks])
        case Cause.PACE:
            return _most(ranks, [_pace(programs, place) for place in range(len(ranks))])
        case Cause.HOST:
            blocked_ms = [sum(item.blocked_ms for item in items) for items in programs.items]
            most_ms = max(blocked_ms)
            return ranks[blocked_ms.index(most_ms)].rank, most_ms
        case Cause.COUNTS:
            return None, step.total_counts_ms
        case Cause.WIRE:
            per_byte = step.wire.ms_per_byte
            return None, 8e-3 / per_byte if per_byte else 0.0


def _pace(programs: Programs, place: int) -> float:
    """Time of a rank's ops over the ranks' median for the same ops; a late begin counts as an op."""
    ops = programs.ops.values()
    usual_ms = sum(op.busy_ms[place] * op.factors(even_rows=False, no_drift=True)[place] for op in ops)
    return (sum(op.busy_ms[place] for op in ops) + programs.late_ms[place]) / usual_ms if usual_ms else 1.0


def _most(ranks: Sequence[TracedRank], values: Sequence[float]) -> tuple[int | None, float]:
    """The rank with the largest value, and that over the mean."""
    mean = statistics.fmean(values)
    if not mean:
        return None, 0.0
    most = max(values)
    return ranks[list(values).index(most)].rank, most / mean
