"""The decisions of ``--lancet-plan auto``: what to measure, when to plan, and which plan to keep. No torch here.

    warm-up -> (profile, plan) -> race -> watch
                     ^                      |
                     +-------- drift -------+

Every rank has a :class:`TuningController` and feeds it the same numbers, so all ranks decide alike at the same step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from megatron_lancet.features.tuning.race import (
    MIN_TURNS,
    NUM_FIRST_SETTLE_STEPS,
    NUM_SETTLE_STEPS,
    Candidate,
    Race,
)
from megatron_lancet.plan_words import plan_in_words
from megatron_lancet.planning.estimate import StepEstimate
from megatron_lancet.planning.search.finalists import NUM_FINALISTS
from megatron_lancet.report.compared import Compared
from megatron_lancet.schedule.plan import Plan, plan_without_overlap
from megatron_lancet.training.observe.step_stats import (
    NUM_WARM_UP_STEPS,
    StepStats,
    StepTimes,
    exposed_noise_ms,
    stats_of_rank,
)

UNEXPECTED_SHARE = 0.10
"""A prediction that is off by more than this share of the measured step is reported as far off."""
DRIFT_SHARE = 0.05
"""Exposed time that moved by more than this share of a step is worth a new plan: a plan rarely gains less."""
NUM_DRIFT_WINDOWS = 3
"""Consecutive measurements that must show the drift: checkpoints and other jobs pass, changed routing does not."""
MIN_STEPS_BETWEEN_PLANS = 200
"""Limits how often a run plans anew: planning costs the time of a few steps."""
_TURNS_PER_MEASUREMENT = 3
"""A turn of the race has this part of the steps of a measurement: plans that are close have several turns."""
_MOST_CANDIDATES = NUM_FINALISTS + 3
"""No overlap, the same with another attention kernel, the planner's plans, and one that ran for the profile."""


class TuningState(StrEnum):
    """Purpose of the present steps of a run."""

    WARM_UP = "warm-up"
    PROFILE = "profile"
    """The profiler chooses the plan of each step; then a plan is made."""
    RACE = "race"
    """Plans run in turns and are measured."""
    VERIFY = "verify"
    """Steps under a checkpoint's plan are measured."""
    WATCH = "watch"
    """Steps under the chosen plan are measured, to notice when its exposed time changes."""
    FIXED = "fixed"
    """The plan is fixed, and nothing is measured."""


@dataclass(frozen=True)
class Planned:
    """The result of planning.

    Attributes:
        finalists: the planner's plans, best first, at least one.
        others: further plans that may win.
        kernel: runs without overlap and with another attention kernel; None if the run can't have that.
        why: a few words on how the plans were found.
        no_overlap_ms: predicted step without overlap; None without a prediction.
    """

    finalists: tuple[Candidate, ...]
    others: tuple[Candidate, ...] = ()
    kernel: Candidate | None = None
    why: str = ""
    no_overlap_ms: float | None = None


class PlanningFailed(Exception):  # noqa: N818 - its name is what happened
    """No plan could be made; the message says why. It is the same on all ranks."""


NO_OVERLAP = Candidate(plan_without_overlap(), "no overlap")


class TuningController:
    """Decides, from the measurements of all ranks, which plan the next steps run by.

    Methods that decide return the plan to switch to before the next step, or None to go on under the present one.
    When one has set ``state`` to PROFILE, the caller profiles and then calls :meth:`planned` or
    :meth:`planning_failed`.

    Attributes:
        plan: plan of the present steps; meaningless while the profiler chooses.
        settled: whether a plan was chosen: it has won, stayed, or was taken from a checkpoint.
        profiled: measured under the first plan of the profile; None before that.
        baseline: the last measurement without overlap; None before one, if a checkpoint's plan has none, or if the
            batch grew after no overlap had left the race.
        prediction: for ``plan``; None if there is none.
        chosen: measured under ``plan`` when it was chosen; None until then.
        compared: ``plan`` and no overlap in the race that ``plan`` has won; None without such a race.
        won: the plan that has won it; None without one.
        kernel_gain: how many times as fast the attention kernel alone was in it; None if it was not in it.
        num_plans: how often a plan was made.
        remark: why the planner's best plan does not run; empty if it runs.
        lines: all lines for the user so far, oldest first.
    """

    def __init__(self, num_tune_steps: int) -> None:
        """
        Args:
            num_tune_steps: steps of one measurement.
        """
        self.num_tune_steps = num_tune_steps
        self.state = TuningState.WARM_UP
        self.plan = plan_without_overlap()
        self.settled = False
        self.profiled: StepStats | None = None
        self.baseline: StepStats | None = None
        self.prediction: StepEstimate | None = None
        self.chosen: StepStats | None = None
        self.compared: Compared | None = None
        self.kernel_gain: float | None = None
        self.won: Plan | None = None
        self.num_plans = 0
        self.remark = ""
        self.lines: list[str] = []
        self._race: Race | None = None
        self._planned: Planned | None = None
        self._num_turn_steps = max(1, num_tune_steps // _TURNS_PER_MEASUREMENT)
        self._num_steps = 0
        self._num_unmeasured = NUM_WARM_UP_STEPS
        self._num_departed = 0
        self._reference: StepStats | None = None
        self._num_steps_since_plan: int | None = None

    @property
    def num_measured_steps(self) -> int:
        """Steps that the next decision needs."""
        if self.state is TuningState.WARM_UP:
            return 0
        is_long = self.state in (TuningState.VERIFY, TuningState.WATCH)
        return self.num_tune_steps if is_long else self._num_turn_steps

    def num_steps_to_plan(self, num_profile_steps: int) -> int:
        """Training steps from the first until the slow plans are out, with the most candidates; close plans race on."""
        num_unmeasured = NUM_FIRST_SETTLE_STEPS + (MIN_TURNS - 1) * NUM_SETTLE_STEPS
        num_in_a_row = (MIN_TURNS - 1) * NUM_SETTLE_STEPS  # a round begins with the last plan of the one before
        num_race_steps = _MOST_CANDIDATES * (num_unmeasured + MIN_TURNS * self._num_turn_steps) - num_in_a_row
        return NUM_WARM_UP_STEPS + num_profile_steps + num_race_steps

    def note(self, line: str) -> None:
        """Adds a line for the user to the lines of the decisions."""
        self.lines.append(line)

    def take_over(self, plan: Plan, baseline: StepStats | None, prediction: StepEstimate | None, line: str) -> Plan:
        """Uses a plan that was found earlier, before the first step; its steps are measured, and not judged."""
        assert self.state is TuningState.WARM_UP
        self.settled, self.baseline, self.prediction = True, baseline, prediction
        return self._to(TuningState.VERIFY, plan, NUM_WARM_UP_STEPS, line)

    def give_up(self, plan: Plan, line: str) -> Plan:
        """Uses a fixed plan instead of tuning, before the first step."""
        assert self.state is TuningState.WARM_UP
        self.settled = True
        return self._to(TuningState.FIXED, plan, 0, line)

    def step_done(self, num_micro_batches: int = 1) -> bool:
        """Counts a step under ``plan``; returns whether :meth:`decide` is due.

        Args:
            num_micro_batches: of this step. If the batch grows during a race, that begins again.
        """
        assert self.state not in (TuningState.PROFILE, TuningState.FIXED)
        self._num_steps += 1
        if self._num_steps_since_plan is not None:
            self._num_steps_since_plan += 1
        if self._race is not None and self._race.begin_again(num_micro_batches):
            self._num_steps = 0
            self.lines += self._race.taken_lines()
        return self._num_steps == self._num_unmeasured + self.num_measured_steps

    def decide(self, steps: Sequence[StepTimes]) -> Plan | None:
        """Decides after a measurement.

        Args:
            steps: the last ``num_measured_steps``, of all ranks together, the same on each.
        """
        if self.state is TuningState.WARM_UP:
            self.state = TuningState.PROFILE
            return None
        self._num_steps = self._num_unmeasured = 0
        if self._race is not None:
            self._race.turn_done(steps)
            return self._race_on()
        stats = stats_of_rank(steps)
        if self.state is TuningState.VERIFY:
            if self.plan == NO_OVERLAP.plan:
                self.baseline = stats
            return self._settle(self.plan, stats, f"measured {stats}")
        assert self.state is TuningState.WATCH, self.state
        self._watched(stats)
        return None

    def profiled_first(self, plan: Plan, steps: Sequence[StepTimes]) -> None:
        """Takes the steps of all ranks together under the first plan of the profile.

        Where ops are profiled, that plan defers weight gradients, and so hides messages. Where only links are, it is
        the plan without overlap.
        """
        assert self.state is TuningState.PROFILE
        self.profiled = stats_of_rank(steps)
        if plan == NO_OVERLAP.plan:
            self.baseline = self.profiled
        self.note(f"{plan_in_words(plan)}: {self.profiled}")

    def step_changed(self) -> None:
        """Takes the next measurement as the reference of drift: the chosen plan takes another time from now on."""
        self._reference = None
        self._num_steps, self._num_unmeasured, self._num_departed = 0, NUM_SETTLE_STEPS, 0

    def planned(self, planned: Planned) -> Plan:
        """Starts a race between the planner's plans, the present one, and no overlap."""
        assert self.state is TuningState.PROFILE
        self.num_plans += 1
        self._num_steps_since_plan = 0
        planned = self._planned = replace(planned, finalists=tuple(map(_without_stages, planned.finalists)))
        kernels = () if planned.kernel is None else (planned.kernel,)
        present = Candidate(self.plan)  # an older prediction may be for other routing, or another batch
        racers: dict[Plan, Candidate] = {}
        for candidate in (NO_OVERLAP, *kernels, *planned.finalists, *planned.others, present):
            known = racers.get(candidate.plan)
            prediction = candidate.prediction if known is None else known.prediction or candidate.prediction
            racers[candidate.plan] = replace(known or candidate, prediction=prediction)
        self._race = Race(list(racers.values()), NO_OVERLAP, planned.kernel, planned.no_overlap_ms)
        found = f" ({planned.why})" if planned.why else ""
        texts = (
            str(one) if one.prediction is None else f"{one}, predicted {one.prediction.step_ms:.1f} ms a step"
            for one in racers.values()
        )
        self.note(f"measuring {len(racers)} plan{'s' if len(racers) > 1 else ''} in turns: {'; '.join(texts)}{found}")
        self.state = TuningState.RACE
        return self._race_on()

    def plan_failed(self, reason: str) -> Plan:
        """Takes the present plan out of the race, because the model can't run it."""
        assert self._race is not None
        self._race.drop(reason)
        return self._race_on()

    def planning_failed(self, reason: str) -> Plan | None:
        """Goes on as before, because no plan could be made."""
        assert self.state is TuningState.PROFILE
        line = f"{reason}; the plan stays {self.plan}"
        if self.chosen is None:
            return self._verify(self.plan, line)
        return self._settle(self.plan, self.chosen, line, switch=True)

    def _race_on(self) -> Plan:
        """Lets the next plan run, or ends the race."""
        race, planned = self._race, self._planned
        assert race is not None
        assert planned is not None
        self.lines += race.taken_lines()
        winner = race.winner
        if winner is None:
            return self._to(TuningState.RACE, race.plan, race.num_unmeasured)
        self._race = None
        self.baseline = race.stats_of(NO_OVERLAP)
        self.prediction = winner.prediction
        self.remark = _remark(winner.plan, planned)
        stats = race.stats_of(winner)
        if stats is None:
            return self._verify(winner.plan, f"{winner.in_words()}: no other plan to compare with")
        self.compared, self.kernel_gain = race.compared(winner), race.gain_of(planned.kernel)
        self.won = winner.plan
        gain = None if self.compared is None else self.compared.gain
        self._settle(winner.plan, stats, _verdict(winner, stats, gain, self.kernel_gain), switch=True)
        return winner.plan

    def _watched(self, stats: StepStats) -> None:
        """Starts a new profile if the exposed time has changed since the plan was chosen, and stays changed."""
        reference = self._reference = self._reference or stats
        moved_ms = stats.exposed_ms - reference.exposed_ms
        threshold_ms = DRIFT_SHARE * reference.step_ms + exposed_noise_ms(reference, stats)
        self._num_departed = self._num_departed + 1 if abs(moved_ms) > threshold_ms else 0
        too_soon = self._num_steps_since_plan is not None and self._num_steps_since_plan < MIN_STEPS_BETWEEN_PLANS
        if self._num_departed < NUM_DRIFT_WINDOWS or too_soon:
            return
        self.note(
            f"exposed time is {stats.exposed_ms:.1f} ms a step for {NUM_DRIFT_WINDOWS * self.num_tune_steps} steps, "
            f"{reference.exposed_ms:.1f} ms before: planning anew"
        )
        self.chosen, self.state = stats, TuningState.PROFILE

    def _verify(self, plan: Plan, line: str) -> Plan:
        """Measures a plan that nothing is compared with."""
        self.settled = True
        return self._to(TuningState.VERIFY, plan, NUM_FIRST_SETTLE_STEPS, line)

    def _settle(self, plan: Plan, stats: StepStats, *lines: str, switch: bool = False) -> Plan | None:
        self.chosen, self._reference, self.settled, self._num_departed = stats, stats, True, 0
        self._to(TuningState.WATCH, plan, NUM_FIRST_SETTLE_STEPS if switch else 0, *lines)
        return plan if switch else None

    def _to(self, state: TuningState, plan: Plan, num_unmeasured: int, *lines: str) -> Plan:
        self.state, self.plan = state, plan
        self._num_steps, self._num_unmeasured = 0, num_unmeasured
        self.lines += lines
        return plan


def _without_stages(candidate: Candidate) -> Candidate:
    """A plan that overlaps nothing is the same, however its layers are cut into segments."""
    plan = candidate.plan
    if plan.overlaps_nothing:
        plan = replace(plan_without_overlap(), dispatch=plan.dispatch, fused_attention=plan.fused_attention)
    return replace(candidate, plan=plan)


def _remark(plan: Plan, planned: Planned) -> str:
    if plan == planned.finalists[0].plan:
        return ""
    if plan == NO_OVERLAP.plan:
        return "no plan led no overlap by more than the noise"
    return "another plan than the one predicted fastest won"


def _verdict(winner: Candidate, stats: StepStats, gain: float | None, kernel_gain: float | None) -> str:
    """One line on the plan that has won."""
    line = f"{winner.in_words()}: measured {stats}"
    if winner.plan == NO_OVERLAP.plan:
        line += ", and no plan is faster by more than the noise"
    elif gain is not None:
        line += f", {gain:.2f}x as fast as no overlap"
    if kernel_gain is not None:
        line += f"; the attention kernel alone gave {kernel_gain:.2f}x"
    if winner.prediction is None:
        return line
    error = winner.prediction.step_ms / stats.step_ms - 1
    far = ", which is far off" if abs(error) > UNEXPECTED_SHARE else ""
    return f"{line}; predicted {winner.prediction.step_ms:.1f} ms, {100 * error:+.1f} %{far}"
