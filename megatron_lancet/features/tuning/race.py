"""The race between plans: each runs a few steps in turns, until one leads by more than the noise. No torch here.

All plans meet the same disturbances of the machine, because they take turns. Rounds alternate in order, A B C and
C B A, so a steady drift of the machine's speed favours no plan. Every step counts as training.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from megatron_lancet.plan_words import plan_text
from megatron_lancet.planning.estimate import StepEstimate
from megatron_lancet.planning.search.finalists import simplicity_of_order
from megatron_lancet.report.compared import Compared
from megatron_lancet.schedule.plan import ChunkDim, Plan
from megatron_lancet.training.observe.step_stats import (
    MIN_NOISE_SHARE,
    StepStats,
    StepTimes,
    stats_of_rank,
    step_noise_ms,
)

NUM_FIRST_SETTLE_STEPS = 2
"""Unmeasured steps of a plan's first turn: the first allocates for it, and the second still finds uneven caches."""
NUM_SETTLE_STEPS = 1
"""Unmeasured steps of later turns: the plan before has left its own blocks of memory and caches. A plan with two turns
in a row goes on at once."""
MIN_TURNS = 2
"""A plan that looks slow in its first turn may have met a disturbance."""
FAR_SLOWER = 1.25
"""A plan without overlap leaves after one turn if its step takes this many times as long as the fastest plan's, as
predicted and in that turn."""
_SAME_STEP = 1.2
"""Such a plan stays if the predicted step without overlap and the step in that turn differ by more than this factor:
the profile or the turn was disturbed, and the reported gain is a ratio to the latter."""
MAX_TURNS = 6
"""After these turns only plans that count as equal to the fastest stay."""
MAX_TIED_TURNS = 12
"""Equal plans take up to this many turns if the noise may hide a difference. Equal plans lose no time by it."""
_EQUAL_PART_OF_NOISE = 0.5
"""Plans that are closer to the fastest than this part of the noise, about one standard error, count as equal."""
TIE_SHARE = 0.005
"""At the end the simplest plan wins if its step is within this share of the fastest plan's step. With the noise as the
limit, more slower plans win: with steps that vary by 4 %, a plan that is 2 % slower wins 17 % of races, not 11 %.
"""


@dataclass(frozen=True)
class Candidate:
    """A plan that may win.

    Attributes:
        name: for the user; the plan's text if empty.
        prediction: None for a plan that was not simulated.
    """

    plan: Plan
    name: str = ""
    prediction: StepEstimate | None = None

    def __str__(self) -> str:
        return self.name or str(self.plan)

    def in_words(self) -> str:
        """Its name; the plan in words and as text if it has none."""
        return self.name or plan_text(self.plan)


@dataclass
class _Entry:
    """A candidate and its measured steps. A late candidate joined after no overlap had left the race.

    The first ``num_old`` steps are not judged: they are older than the last candidate.
    """

    candidate: Candidate
    steps: list[StepTimes] = field(default_factory=list)
    num_old: int = 0
    num_turns: int = 0
    has_run: bool = False
    is_late: bool = False

    @property
    def stats(self) -> StepStats:
        return stats_of_rank(self.steps[self.num_old :])


class Race:
    """Measures candidates in turns. Every rank feeds its own race the same numbers."""

    def __init__(
        self,
        candidates: Sequence[Candidate],
        no_overlap: Candidate,
        kernel: Candidate | None,
        predicted_ms: float | None = None,
    ) -> None:
        """
        Args:
            candidates: at least one, of different plans, in the order of their turns.
            no_overlap: the one of them that runs as stock does.
            kernel: the same with another attention kernel; None if that is not among them.
            predicted_ms: a step without overlap, as predicted, with the kernel if there is one; None without a
                prediction.
        """
        self._entries = {candidate.plan: _Entry(candidate) for candidate in candidates}
        self._no_overlap = self._entries[no_overlap.plan]
        self._kernel = None if kernel is None else self._entries[kernel.plan]
        self._queue = deque(self._entries.values())
        self._predicted_ms = predicted_ms
        self._num_left_of_turn = len(self._queue)
        self._num_micro_batches: int | None = None
        self._lines: list[str] = []
        self._ran_last: _Entry | None = None

    @property
    def plan(self) -> Plan:
        """The plan whose turn it is."""
        return self._queue[0].candidate.plan

    @property
    def num_unmeasured(self) -> int:
        """Steps of this turn that do not count."""
        if self._queue[0] is self._ran_last:
            return 0
        return NUM_SETTLE_STEPS if self._queue[0].has_run else NUM_FIRST_SETTLE_STEPS

    @property
    def winner(self) -> Candidate | None:
        """The only plan that is left; None while the race goes on."""
        return self._queue[0].candidate if len(self._queue) == 1 else None

    def stats_of(self, candidate: Candidate) -> StepStats | None:
        """All measured steps of a candidate, also of one that is out; None if it has none."""
        entry = self._entries[candidate.plan]
        return stats_of_rank(entry.steps) if entry.steps else None

    def gain_of(self, candidate: Candidate | None) -> float | None:
        """How many times as fast as no overlap a candidate is, in turns that both had; None if it has none."""
        compared = None if candidate is None else self.compared(candidate)
        return None if compared is None else compared.gain

    def compared(self, candidate: Candidate) -> Compared | None:
        """A candidate and as many steps without overlap; None if it has none."""
        entry = self._entries[candidate.plan]
        ours, stocks = self._in_same_turns(entry)
        if ours is None or stocks is None:
            return None
        exposed_ms = stocks.exposed_ms, ours.exposed_ms
        return Compared(stocks.step_ms, ours.step_ms, *exposed_ms, int(ours.num_steps), not entry.is_late)

    def _in_same_turns(self, entry: _Entry) -> tuple[StepStats | None, StepStats | None]:
        """The first steps of a candidate, and as many without overlap."""
        stocks = self._no_overlap.steps
        num = min(len(entry.steps), len(stocks))
        return (stats_of_rank(entry.steps[:num]), stats_of_rank(stocks[:num])) if num else (None, None)

    def taken_lines(self) -> list[str]:
        """The lines for the user since the last call."""
        lines, self._lines = self._lines, []
        return lines

    def turn_done(self, steps: Sequence[StepTimes]) -> None:
        """Counts the measured steps of a turn, and lets the next plan run."""
        entry = self._queue[0]
        entry.steps += steps
        entry.num_turns, entry.has_run, self._ran_last = entry.num_turns + 1, True, entry
        self._queue.rotate(-1)
        self._next()

    def drop(self, reason: str) -> None:
        """Takes out the plan whose turn it is, because it can't run; the plan without overlap stays in any case."""
        entry = self._queue[0]
        assert entry is not self._no_overlap, reason
        assert self.winner is None, reason
        self._lines.append(f"{entry.candidate} is out: {reason}")
        self._queue.popleft()
        self._ran_last = None  # the switch to the plan may have begun
        self._next()

    def begin_again(self, num_micro_batches: int) -> bool:
        """Starts anew, from the present plan on, if steps have another number of micro-batches than before."""
        if self._num_micro_batches in (None, num_micro_batches):
            self._num_micro_batches = num_micro_batches
            return False
        self._lines.append(
            f"a step has {num_micro_batches} micro-batches now, {self._num_micro_batches} before: measuring anew"
        )
        self._num_micro_batches, self._predicted_ms = num_micro_batches, None
        for entry in self._entries.values():
            entry.candidate, entry.steps = replace(entry.candidate, prediction=None), []
            entry.num_turns = entry.num_old = 0
        self._num_left_of_turn = len(self._queue)
        return True

    def _next(self) -> None:
        self._num_left_of_turn -= 1
        if self._num_left_of_turn == 0:
            self._judge()
            self._queue.reverse()
            self._num_left_of_turn = len(self._queue)

    def _judge(self) -> None:
        """Takes out what is clearly slower, and all but one when the race is over."""
        num_turns = min(entry.num_turns for entry in self._queue)
        stats = [(entry, entry.stats) for entry in self._entries.values() if entry in self._queue]
        leader, best = min(stats, key=lambda one: one[1].step_ms)
        if num_turns < MIN_TURNS and len(self._queue) > 1:
            slower = self._far_slower(stats, best)
        else:
            slower = [(entry, own) for entry, own in stats if own.step_ms > best.step_ms + step_noise_ms(best, own)]
        self._leave([entry for entry, _ in slower])
        if slower:
            out = ", ".join(f"{entry.candidate} ({own.step_ms:.1f} ms)" for entry, own in slower)
            turns = f"{num_turns} turn{'s' if num_turns > 1 else ''}"
            self._lines.append(f"out after {turns}: {out}; {leader.candidate} takes {best.step_ms:.1f} ms")
        if num_turns >= MAX_TURNS:
            close = [(entry, own) for entry, own in stats if _are_equal(best, own)]
            may_differ = any(_equal_within_noise_ms(best, own) > MIN_NOISE_SHARE * best.step_ms for _, own in close)
            kept = [entry for entry, _ in close]
            if num_turns >= MAX_TIED_TURNS or not may_differ:
                tied = [entry for entry, own in close if own.step_ms <= (1 + TIE_SHARE) * best.step_ms]
                kept = [min(tied, key=lambda entry: (*_simplicity(entry.candidate.plan), entry.stats.step_ms))]
            self._leave([entry for entry in self._queue if entry not in kept])
        if len(self._queue) == 1:
            self._add_other_kernel()

    def _far_slower(self, stats: Sequence[tuple[_Entry, StepStats]], best: StepStats) -> list[tuple[_Entry, StepStats]]:
        """Plans without overlap that are far slower than the fastest plan by prediction and in their first turn.

        Their steps cost most, and a disturbance rarely lasts from the profile to that turn. None leaves if prediction
        and measurement disagree. Two plans always stay.
        """
        limit_ms = FAR_SLOWER * best.step_ms
        if self._predicted_ms is None or self._predicted_ms <= limit_ms:
            return []
        in_turn_ms = (self._kernel or self._no_overlap).stats.step_ms
        if max(in_turn_ms, self._predicted_ms) > _SAME_STEP * min(in_turn_ms, self._predicted_ms):
            return []
        slower = [
            (entry, own) for entry, own in stats if entry.candidate.plan.overlaps_nothing and own.step_ms > limit_ms
        ]
        return slower if len(stats) - len(slower) > 1 else []

    def _leave(self, entries: Sequence[_Entry]) -> None:
        self._queue = deque(entry for entry in self._queue if entry not in entries)

    def _add_other_kernel(self) -> None:
        """Lets the winner run with the other attention kernel too, if steps without overlap speak for that kernel.

        The fused kernel's gain is often smaller than the noise, so it is left out only where it is slower.
        """
        kernel, winner = self._kernel, self._queue[0]
        plan = winner.candidate.plan
        is_cut = has_kernel(plan) and not plan.fused_attention
        if kernel is None or is_cut:
            return
        other = replace(plan, fused_attention=not plan.fused_attention)
        own, stock = self._in_same_turns(kernel)
        if own is None or stock is None or other in self._entries:
            return
        is_slower = own.step_ms > stock.step_ms + step_noise_ms(stock, own)
        if is_slower != plan.fused_attention:
            return
        self._entries[other] = _Entry(Candidate(other), is_late=True)
        winner.num_turns, winner.num_old = 0, len(winner.steps)
        self._queue.append(self._entries[other])
        self._lines.append(
            f"the attention kernel makes a step without overlap {stock.step_ms / own.step_ms:.2f}x as fast: trying "
            f"{winner.candidate} with{'out' if is_slower else ''} it"
        )


def _equal_within_noise_ms(best: StepStats, own: StepStats) -> float:
    return _EQUAL_PART_OF_NOISE * step_noise_ms(best, own)


def _are_equal(best: StepStats, own: StepStats) -> bool:
    return own.step_ms <= best.step_ms + max(MIN_NOISE_SHARE * best.step_ms, _equal_within_noise_ms(best, own))


def has_kernel(plan: Plan) -> bool:
    """Whether all layers have the attention kernel of sequence chunks."""
    return plan.fused_attention or all(
        segment.num_chunks > 1 and segment.chunk_dim is ChunkDim.SEQUENCE and segment.range.has_attention
        for segment in (*plan.segments, *plan.at_ends.segments)
    )


def with_kernel(plan: Plan) -> Plan:
    """The plan with that kernel in all layers."""
    return plan if has_kernel(plan) else replace(plan, fused_attention=True)


def _simplicity(plan: Plan) -> tuple[object, ...]:
    """No overlap first, then stock's dispatch, and simpler pairs and chunks.

    dWs and the attention kernel make no plan simpler than another, but stock's own kernel is the simplest of all.
    """
    is_stocks = plan.overlaps_nothing and not plan.fused_attention
    return not plan.overlaps_nothing, not is_stocks, not plan.dispatch.is_plain, *simplicity_of_order(plan)
