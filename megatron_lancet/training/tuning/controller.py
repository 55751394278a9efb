"""The decisions of ``--lancet-plan auto``: what to measure, when to plan, and whether to keep a plan. No torch here.

    warm-up -> baseline -> (profile, plan) -> verify -> watch
                                ^              |          |
                                |              +- back ---+
                                +---------- drift --------+

Every rank has a :class:`TuningController` and feeds it the same numbers, so all ranks decide alike at the same step.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from megatron_lancet.planning.estimate import StepEstimate
from megatron_lancet.schedule.plan import DwPolicy, Plan, fixed_plan
from megatron_lancet.training.tuning.step_stats import StepStats, exposed_noise_ms, step_noise_ms

NUM_TUNING_WARM_UP_STEPS = 3
"""A run's first steps allocate memory, connect the ranks and fill caches."""
NUM_SETTLE_STEPS = 2
"""Unmeasured steps after a switch: the first allocates for the new plan, and the second still finds uneven caches."""
UNEXPECTED_SHARE = 0.10
"""A prediction that is off by more than this share of the measured step is reported as far off."""
DRIFT_SHARE = 0.05
"""Exposed time that moved by more than this share of a step is worth a new plan: a plan rarely gains less."""
NUM_DRIFT_WINDOWS = 3
"""Consecutive measurements that must show the drift: checkpoints and other jobs pass, changed routing does not."""
MIN_STEPS_BETWEEN_PLANS = 200
"""Limits how often a run plans anew: planning costs the time of a few steps."""
MAX_OTHER_TRIES = 1
"""Profiled plans that are tried after the planned one: each costs the steps of a verification."""


class TuningState(StrEnum):
    """Purpose of the present steps of a run."""

    WARM_UP = "warm-up"
    BASELINE = "baseline"
    """Steps without overlap are measured."""
    PROFILE = "profile"
    """The profiler chooses the plan of each step; then a plan is made."""
    VERIFY = "verify"
    """Steps under a new plan are measured."""
    WATCH = "watch"
    """Steps under the chosen plan are measured, to notice when its exposed time changes."""
    FIXED = "fixed"
    """The plan is fixed, and nothing is measured."""


@dataclass(frozen=True)
class Planned:
    """The result of planning.

    Attributes:
        prediction: step time and exposed communication that measurements of the plan are expected to show.
        why: a few words on how the plan was found.
        profiled: plans that ran for the profile and their step times in ms, by name.
    """

    plan: Plan
    prediction: StepEstimate
    why: str = ""
    profiled: Mapping[str, tuple[Plan, float]] = field(default_factory=dict)


class PlanningFailed(Exception):  # noqa: N818 - its name is what happened
    """No plan could be made; the message says why. It is the same on all ranks."""


@dataclass
class _Trial:
    """A planned plan, and profiled ones in its place, while they are compared with the plan that ran before.

    Attributes:
        before: measured under ``fallback``, the plan that ran before.
        others: profiled plans that were not tried yet, and their step times in ms.
        best: the fastest plan of those that paid.
        rejected: the fastest plan of those that were slower than the fallback.
        is_repeat: whether the fallback is being measured again.
    """

    planned: Planned
    before: StepStats
    fallback: Plan
    others: dict[str, tuple[Plan, float]]
    best: tuple[Plan, StepStats] | None = None
    rejected: tuple[Plan, StepStats] | None = None
    is_repeat: bool = False
    num_other_tries: int = 0


def plan_without_overlap() -> Plan:
    """One chunk, every weight gradient at once: stock's arithmetic, to the bit."""
    return fixed_plan(1, DwPolicy.NONE)


class TuningController:
    """Decides, from the measurements of all ranks, which plan the next steps run by.

    Methods that decide return the plan to switch to before the next step, or None to go on under the present one.
    When one has set ``state`` to PROFILE, the caller profiles and then calls :meth:`planned` or
    :meth:`planning_failed`.

    Attributes:
        plan: plan of the present steps; meaningless while the profiler chooses.
        settled: whether ``plan`` was chosen: planned and verified, returned to, or taken from a checkpoint.
        baseline: measured without overlap; None before that, or if the plan is a checkpoint's.
        prediction: for ``plan``; None if there is none.
        chosen: measured under ``plan`` when it was chosen; None until then.
        num_plans: how often a plan was made.
        remark: why the last plan does not run; empty if it runs.
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
        self.baseline: StepStats | None = None
        self.prediction: StepEstimate | None = None
        self.chosen: StepStats | None = None
        self.num_plans = 0
        self.remark = ""
        self.lines: list[str] = []
        self._trial: _Trial | None = None
        self._num_steps = 0
        self._num_unmeasured = NUM_TUNING_WARM_UP_STEPS
        self._num_departed = 0
        self._num_steps_since_plan: int | None = None

    def num_steps_to_plan(self, num_profile_steps: int) -> int:
        """Training steps from the first to a verified plan; a shorter run gains nothing from tuning."""
        return NUM_TUNING_WARM_UP_STEPS + num_profile_steps + NUM_SETTLE_STEPS + 2 * self.num_tune_steps

    def note(self, line: str) -> None:
        """Adds a line for the user to the lines of the decisions."""
        self.lines.append(line)

    def take_over(self, plan: Plan, baseline: StepStats | None, prediction: StepEstimate | None, line: str) -> Plan:
        """Uses a plan that was found earlier, before the first step; its steps are measured, and not judged."""
        assert self.state is TuningState.WARM_UP
        self.settled, self.baseline, self.prediction = True, baseline, prediction
        return self._to(TuningState.VERIFY, plan, NUM_TUNING_WARM_UP_STEPS, line)

    def give_up(self, plan: Plan, line: str) -> Plan:
        """Uses a fixed plan instead of tuning, before the first step."""
        assert self.state is TuningState.WARM_UP
        self.settled = True
        return self._to(TuningState.FIXED, plan, 0, line)

    def step_done(self) -> bool:
        """Counts a step under ``plan``; returns whether :meth:`decide` is due, with the last ``num_tune_steps``."""
        assert self.state not in (TuningState.PROFILE, TuningState.FIXED)
        self._num_steps += 1
        if self._num_steps_since_plan is not None:
            self._num_steps_since_plan += 1
        if self.state is TuningState.WARM_UP and self._num_steps == self._num_unmeasured:
            self.state = TuningState.BASELINE
        return self._num_steps == self._num_unmeasured + self.num_tune_steps

    def decide(self, stats: StepStats) -> Plan | None:
        """Decides after ``num_tune_steps`` measured steps.

        Args:
            stats: measured over all ranks, the same on each.
        """
        self._num_steps = self._num_unmeasured = 0
        if self.state is TuningState.BASELINE:
            self.baseline, self.state = stats, TuningState.PROFILE
            self.note(f"without overlap: {stats}")
            return None
        if self.state is TuningState.VERIFY:
            return self._verified(stats)
        assert self.state is TuningState.WATCH, self.state
        self._watched(stats)
        return None

    def planned(self, planned: Planned) -> Plan | None:
        """Verifies the planner's plan, or a profiled one that was faster than the present plan."""
        assert self.state is TuningState.PROFILE
        before = self.chosen or self.baseline
        assert before is not None
        plan, prediction = planned.plan, planned.prediction
        if plan.overlaps_nothing:
            # The same, however its layers are cut into segments.
            plan = replace(plan_without_overlap(), dispatch=plan.dispatch)
        self.num_plans += 1
        self.remark = ""
        self._num_steps_since_plan = 0
        found = f" ({planned.why})" if planned.why else ""
        line = f"{plan}: predicted {prediction.step_ms:.1f} ms a step, measured before {before.step_ms:.1f} ms{found}"
        others = {name: other for name, other in planned.profiled.items() if other[0] not in (plan, self.plan)}
        trial = _Trial(replace(planned, plan=plan), before, self.plan, others)
        if plan != self.plan:
            self._trial = trial
            return self._to(TuningState.VERIFY, plan, NUM_SETTLE_STEPS, line)
        line += "; nothing else is expected to be faster"
        trial.best = plan, before
        other = self._try_other(trial, before, line)
        if other is not None:
            self._trial = trial
            return other
        self.prediction = prediction
        return self._settle(plan, before, line, switch=True)

    def planning_failed(self, reason: str) -> Plan | None:
        """Goes on as before, because no plan could be made."""
        assert self.state is TuningState.PROFILE
        before = self.chosen or self.baseline
        assert before is not None
        return self._settle(self.plan, before, f"{reason}; the plan stays {self.plan}", switch=True)

    def _verified(self, stats: StepStats) -> Plan | None:
        trial = self._trial
        if trial is None:  # a checkpoint's plan: there is nothing to compare it with
            return self._settle(self.plan, stats, f"measured {stats}")
        if trial.is_repeat:
            return self._measured_again(trial, stats)
        paid = stats.step_ms <= trial.before.step_ms + step_noise_ms(trial.before, stats)
        if paid and (trial.best is None or stats.step_ms < trial.best[1].step_ms):
            trial.best = self.plan, stats
        if not paid and (trial.rejected is None or stats.step_ms < trial.rejected[1].step_ms):
            trial.rejected = self.plan, stats
        lines = [_verdict(trial, self.plan, stats, paid)]
        other = self._try_other(trial, stats, *lines)
        if other is not None:
            return other
        if trial.best is None:
            trial.is_repeat = True
            lines.append(
                f"going back to {trial.fallback}: {trial.before.step_ms:.1f} ms a step; measuring that again, because "
                "the machine may have changed meanwhile"
            )
            return self._to(TuningState.VERIFY, trial.fallback, NUM_SETTLE_STEPS, *lines)
        best, best_stats = trial.best
        self._chose(best, trial)
        switch = best != self.plan
        if switch:
            lines.append(f"going back to {best}: {best_stats.step_ms:.1f} ms a step")
        return self._settle(best, best_stats, *lines, switch=switch)

    def _measured_again(self, trial: _Trial, stats: StepStats) -> Plan | None:
        """Compares old, new and old again: a machine that became slower shows in the two measurements of the old."""
        assert trial.rejected is not None
        plan, its_stats = trial.rejected
        line = f"measured {stats} under {trial.fallback}"
        if stats.step_ms <= its_stats.step_ms:
            self._trial, self.remark = None, "slower than before, so it went back"
            return self._settle(trial.fallback, stats, f"{line}: it stays")
        self._chose(plan, trial)
        line += f": the machine had become slower; taking {plan} after all: {its_stats.step_ms:.1f} ms a step"
        return self._settle(plan, its_stats, line, switch=True)

    def _chose(self, plan: Plan, trial: _Trial) -> None:
        """Ends a trial with the planned plan or a profiled one."""
        self._trial = None
        if plan == trial.planned.plan:
            self.prediction, self.remark = trial.planned.prediction, ""
        else:
            self.prediction, self.remark = None, "a plan that ran for the profile was faster"

    def _try_other(self, trial: _Trial, stats: StepStats, *lines: str) -> Plan | None:
        """Verifies a profiled plan, if one was clearly faster than the fallback and all plans that were tried.

        Args:
            stats: figures of the plan that was measured last.
            lines: lines to report before the attempt.
        """
        if trial.num_other_tries == MAX_OTHER_TRIES or not trial.others:
            return None
        name = min(trial.others, key=lambda name: (trial.others[name][1], name))
        plan, step_ms = trial.others.pop(name)
        bar_ms = min(trial.before.step_ms, stats.step_ms, trial.best[1].step_ms if trial.best else stats.step_ms)
        if step_ms >= bar_ms - step_noise_ms(trial.before, stats):
            return None
        trial.num_other_tries += 1
        trying = f"trying {name}, which took {step_ms:.1f} ms a step while profiling"
        return self._to(TuningState.VERIFY, plan, NUM_SETTLE_STEPS, *lines, trying)

    def _watched(self, stats: StepStats) -> None:
        """Starts a new profile if the exposed time has changed since the plan was chosen, and stays changed."""
        assert self.chosen is not None
        moved_ms = stats.exposed_ms - self.chosen.exposed_ms
        threshold_ms = DRIFT_SHARE * self.chosen.step_ms + exposed_noise_ms(self.chosen, stats)
        self._num_departed = self._num_departed + 1 if abs(moved_ms) > threshold_ms else 0
        too_soon = self._num_steps_since_plan is not None and self._num_steps_since_plan < MIN_STEPS_BETWEEN_PLANS
        if self._num_departed < NUM_DRIFT_WINDOWS or too_soon:
            return
        self.note(
            f"exposed time is {stats.exposed_ms:.1f} ms a step for {NUM_DRIFT_WINDOWS * self.num_tune_steps} steps, "
            f"{self.chosen.exposed_ms:.1f} ms when the plan was chosen: planning anew"
        )
        self.chosen, self.state = stats, TuningState.PROFILE

    def _settle(self, plan: Plan, stats: StepStats, *lines: str, switch: bool = False) -> Plan | None:
        self.chosen, self.settled, self._num_departed = stats, True, 0
        self._to(TuningState.WATCH, plan, NUM_SETTLE_STEPS if switch else 0, *lines)
        return plan if switch else None

    def _to(self, state: TuningState, plan: Plan, num_unmeasured: int, *lines: str) -> Plan:
        self.state, self.plan = state, plan
        self._num_steps, self._num_unmeasured = 0, num_unmeasured
        self.lines += lines
        return plan


def _verdict(trial: _Trial, plan: Plan, stats: StepStats, paid: bool) -> str:
    """One line on a plan that was measured."""
    noise_ms = step_noise_ms(trial.before, stats)
    before_ms = trial.before.step_ms
    if not paid:
        verdict = f"slower than the {before_ms:.1f} ms before by more than the noise of {noise_ms:.1f} ms"
    elif stats.step_ms >= before_ms - noise_ms:
        verdict = f"as fast as before ({before_ms:.1f} ms) within the noise of {noise_ms:.1f} ms"
    else:
        verdict = f"{before_ms / stats.step_ms:.2f}x as fast as before ({before_ms:.1f} ms)"
    line = f"measured {stats}: {verdict}"
    if plan != trial.planned.plan:
        return line
    predicted_ms = trial.planned.prediction.step_ms
    error = predicted_ms / stats.step_ms - 1
    remark = ", which is far off" if abs(error) > UNEXPECTED_SHARE else ""
    return f"{line}; predicted {predicted_ms:.1f} ms, {100 * error:+.1f} %{remark}"
