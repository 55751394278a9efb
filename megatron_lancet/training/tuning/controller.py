"""The decisions of ``--lancet-plan auto``: what to measure, when to plan, and whether a plan stays. No torch here.

    warm-up -> baseline -> (profile, plan) -> verify -> watch
                                ^              |          |
                                |              +- back ---+
                                +---------- drift --------+

Every rank holds a :class:`Tuning` and feeds it the same numbers, so all ranks decide alike at the same step.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from megatron_lancet.planning.estimate import StepEstimate
from megatron_lancet.schedule.plan import DwPolicy, Plan, fixed_plan
from megatron_lancet.training.tuning.step_stats import Figures, exposed_noise_ms, step_noise_ms

NUM_WARM_UP_STEPS = 3
"""A run's first steps allocate memory, connect the ranks and fill caches."""
NUM_SETTLE_STEPS = 2
"""After a switch: the first step under a plan allocates for it, and the second still finds uneven caches."""
UNEXPECTED_SHARE = 0.10
"""A prediction that is off by more than this share of the measured step is worth a word."""
DRIFT_SHARE = 0.05
"""Exposed time that moved by more than this share of a step is worth a new plan: a plan rarely gains less."""
NUM_DRIFT_WINDOWS = 3
"""Windows of measured steps in a row that must depart: a checkpoint or a neighbour's job passes, routing does not."""
MIN_STEPS_BETWEEN_PLANS = 200
"""From one plan to the next: planning costs the time of a few steps, and must not become a habit."""
MAX_OTHER_TRIES = 1
"""Profiled plans that are tried where the planned one turns out slower: each costs the steps of a verification."""


class Stage(StrEnum):
    """How far a run has come."""

    WARM_UP = "warm-up"
    BASELINE = "baseline"
    """Steps without overlap are measured."""
    PROFILE = "profile"
    """The profiler chooses the plan of each step; then one is made."""
    VERIFY = "verify"
    """Steps under a new plan are measured."""
    WATCH = "watch"
    FIXED = "fixed"
    """A plan that nobody judges."""


@dataclass(frozen=True)
class Decision:
    """What follows from a step's figures.

    Attributes:
        plan: to switch to before the next step; None to go on under the present one.
        make_plan: a plan is wanted: profile, then call :meth:`Tuning.planned`.
        lines: for the user.
    """

    plan: Plan | None = None
    make_plan: bool = False
    lines: tuple[str, ...] = ()


@dataclass
class _Trial:
    """A plan that has to prove itself against what ran before.

    Attributes:
        others: plans that ran for the profile, and their step times in ms.
        best: the fastest of those that paid.
        rejected: the fastest that was slower than what ran before.
        is_repeat: what ran before is being measured again.
    """

    plan: Plan
    prediction: StepEstimate | None
    before: Figures
    fallback: Plan
    others: dict[str, tuple[Plan, float]] = field(default_factory=dict)
    best: tuple[Plan, Figures] | None = None
    rejected: tuple[Plan, Figures] | None = None
    is_repeat: bool = False
    num_other_tries: int = 0


def plan_without_overlap() -> Plan:
    """One chunk, every weight gradient at once: stock's arithmetic, to the bit."""
    return fixed_plan(1, DwPolicy.NONE)


class Tuning:
    """Where a run stands between its first step and its final plan.

    Attributes:
        stage: what the present steps are for.
        plan: of the present steps; meaningless while the profiler chooses.
        settled: whether ``plan`` was chosen: planned and verified, gone back to, or taken over.
        baseline: figures without overlap; None until measured, or if a plan was taken over.
        prediction: for ``plan``; None if nobody made one.
        chosen: figures that ``plan`` showed when it was chosen; None until then.
        num_plans: how often a plan was made.
        remark: what became of the last plan that was made, if it is not the one that runs; else empty.
        lines: everything that was said, oldest first.
    """

    def __init__(self, num_tune_steps: int) -> None:
        """
        Args:
            num_tune_steps: steps that are measured at a time.
        """
        self.num_tune_steps = num_tune_steps
        self.stage = Stage.WARM_UP
        self.plan = plan_without_overlap()
        self.settled = False
        self.baseline: Figures | None = None
        self.prediction: StepEstimate | None = None
        self.chosen: Figures | None = None
        self.num_plans = 0
        self.remark = ""
        self.lines: list[str] = []
        self._trial: _Trial | None = None
        self._num_steps = 0
        self._num_unmeasured = NUM_WARM_UP_STEPS
        self._num_departed = 0
        self._num_steps_since_plan: int | None = None

    def num_steps_to_plan(self, num_profile_steps: int) -> int:
        """Training steps from the first to a verified plan; a run needs more than these to gain anything."""
        return NUM_WARM_UP_STEPS + num_profile_steps + NUM_SETTLE_STEPS + 2 * self.num_tune_steps

    def note(self, line: str) -> None:
        """Something to say beside what a decision says."""
        self.lines.append(line)

    def take_over(self, plan: Plan, baseline: Figures | None, prediction: StepEstimate | None, line: str) -> Decision:
        """Use a plan that was found earlier, before the first step; what it takes is measured, and not judged."""
        assert self.stage is Stage.WARM_UP
        self.settled, self.baseline, self.prediction = True, baseline, prediction
        return self._to(Stage.VERIFY, plan, NUM_WARM_UP_STEPS, line)

    def give_up(self, plan: Plan, line: str) -> Decision:
        """Use a fixed plan instead of tuning, before the first step."""
        assert self.stage is Stage.WARM_UP
        self.settled = True
        return self._to(Stage.FIXED, plan, 0, line)

    def step_done(self) -> bool:
        """Count a step under ``plan``. True: :meth:`decide` wants the figures of the last ``num_tune_steps``."""
        assert self.stage not in (Stage.PROFILE, Stage.FIXED)
        self._num_steps += 1
        if self._num_steps_since_plan is not None:
            self._num_steps_since_plan += 1
        if self.stage is Stage.WARM_UP and self._num_steps == self._num_unmeasured:
            self.stage = Stage.BASELINE
        return self._num_steps == self._num_unmeasured + self.num_tune_steps

    def decide(self, figures: Figures) -> Decision:
        """What to do now that ``num_tune_steps`` steps were measured.

        Args:
            figures: of all ranks, the same on each.
        """
        self._num_steps = self._num_unmeasured = 0
        if self.stage is Stage.BASELINE:
            self.baseline = figures
            return self._want_plan(f"without overlap: {figures}")
        if self.stage is Stage.VERIFY:
            return self._verified(figures)
        assert self.stage is Stage.WATCH, self.stage
        return self._watched(figures)

    def planned(
        self,
        plan: Plan,
        prediction: StepEstimate,
        profiled: Mapping[str, tuple[Plan, float]] | None = None,
        why: str = "",
    ) -> Decision:
        """Go on with the planner's plan.

        Args:
            prediction: as it will be measured.
            profiled: step times in ms of plans that ran for the profile, by name; tried if the planned one is slower.
            why: a few words on how the plan was found.
        """
        assert self.stage is Stage.PROFILE
        before = self.chosen or self.baseline
        assert before is not None
        if plan.num_chunks == 1 and plan.dw_policy is DwPolicy.NONE:
            plan = plan_without_overlap()  # the same, however its layers are cut into segments
        self.num_plans += 1
        self.remark = ""
        self._num_steps_since_plan = 0
        found = f" ({why})" if why else ""
        line = f"{plan}: predicted {prediction.step_ms:.1f} ms a step, measured before {before.step_ms:.1f} ms{found}"
        others = {name: other for name, other in (profiled or {}).items() if other[0] not in (plan, self.plan)}
        trial = _Trial(plan, prediction, before, self.plan, others)
        if plan != self.plan:
            self._trial = trial
            return self._to(Stage.VERIFY, plan, NUM_SETTLE_STEPS, line)
        line += "; nothing else is expected to be faster"
        trial.best = plan, before
        decision = self._try_other(trial, before, line)
        if decision is not None:
            self._trial = trial
            return decision
        self.prediction = prediction
        return self._settle(plan, before, line, switch=True)

    def planning_failed(self, reason: str) -> Decision:
        """Go on as before, because no plan could be made."""
        assert self.stage is Stage.PROFILE
        before = self.chosen or self.baseline
        assert before is not None
        return self._settle(self.plan, before, f"{reason}; the plan stays {self.plan}", switch=True)

    def _want_plan(self, line: str) -> Decision:
        self.stage = Stage.PROFILE
        return self._said(Decision(make_plan=True, lines=(line,)))

    def _verified(self, figures: Figures) -> Decision:
        trial = self._trial
        if trial is None:  # taken over: nothing to compare with
            return self._settle(self.plan, figures, f"measured {figures}")
        if trial.is_repeat:
            return self._measured_again(trial, figures)
        paid = figures.step_ms <= trial.before.step_ms + step_noise_ms(trial.before, figures)
        if paid and (trial.best is None or figures.step_ms < trial.best[1].step_ms):
            trial.best = self.plan, figures
        if not paid and (trial.rejected is None or figures.step_ms < trial.rejected[1].step_ms):
            trial.rejected = self.plan, figures
        lines = [_verdict(trial, self.plan, figures, paid)]
        decision = self._try_other(trial, figures, *lines)
        if decision is not None:
            return decision
        if trial.best is None:
            trial.is_repeat = True
            lines.append(
                f"going back to {trial.fallback}: {trial.before.step_ms:.1f} ms a step; measuring that again, because "
                "the machine may have changed meanwhile"
            )
            return self._to(Stage.VERIFY, trial.fallback, NUM_SETTLE_STEPS, *lines)
        self._trial = None
        best, best_figures = trial.best
        if best == trial.plan:
            self.prediction = trial.prediction
        else:
            self.prediction, self.remark = None, "a plan that ran for the profile was faster"
        switch = best != self.plan
        if switch:
            lines.append(f"going back to {best}: {best_figures.step_ms:.1f} ms a step")
        return self._settle(best, best_figures, *lines, switch=switch)

    def _measured_again(self, trial: _Trial, figures: Figures) -> Decision:
        """What ran before, measured after what looked slower: old, new, old. A drift shows in the old ones."""
        assert trial.rejected is not None
        self._trial = None
        plan, its_figures = trial.rejected
        line = f"measured {figures} under {trial.fallback}"
        if figures.step_ms <= its_figures.step_ms:
            self.remark = "slower than before, so it went back"
            return self._settle(trial.fallback, figures, f"{line}: it stays")
        self.prediction = trial.prediction if plan == trial.plan else None
        self.remark = "" if plan == trial.plan else "a plan that ran for the profile was faster"
        line += f": the machine had become slower; taking {plan} after all: {its_figures.step_ms:.1f} ms a step"
        return self._settle(plan, its_figures, line, switch=True)

    def _try_other(self, trial: _Trial, figures: Figures, *lines: str) -> Decision | None:
        """Verify a profiled plan that was clearly faster than what ran before and all that was tried, if any is left.

        Args:
            figures: of the plan that was measured last.
            lines: to say first.
        """
        if trial.num_other_tries == MAX_OTHER_TRIES or not trial.others:
            return None
        name = min(trial.others, key=lambda name: (trial.others[name][1], name))
        plan, step_ms = trial.others.pop(name)
        bar_ms = min(trial.before.step_ms, figures.step_ms, trial.best[1].step_ms if trial.best else figures.step_ms)
        if step_ms >= bar_ms - step_noise_ms(trial.before, figures):
            return None
        trial.num_other_tries += 1
        trying = f"trying {name}, which took {step_ms:.1f} ms a step while profiling"
        return self._to(Stage.VERIFY, plan, NUM_SETTLE_STEPS, *lines, trying)

    def _watched(self, figures: Figures) -> Decision:
        """Steps of a chosen plan: has its exposed time moved since it was chosen?"""
        assert self.chosen is not None
        moved_ms = figures.exposed_ms - self.chosen.exposed_ms
        threshold_ms = DRIFT_SHARE * self.chosen.step_ms + exposed_noise_ms(self.chosen, figures)
        self._num_departed = self._num_departed + 1 if abs(moved_ms) > threshold_ms else 0
        too_soon = self._num_steps_since_plan is not None and self._num_steps_since_plan < MIN_STEPS_BETWEEN_PLANS
        if self._num_departed < NUM_DRIFT_WINDOWS or too_soon:
            return Decision()
        line = (
            f"exposed time is {figures.exposed_ms:.1f} ms a step for {NUM_DRIFT_WINDOWS * self.num_tune_steps} steps, "
            f"{self.chosen.exposed_ms:.1f} ms when the plan was chosen: planning anew"
        )
        self.chosen = figures
        return self._want_plan(line)

    def _settle(self, plan: Plan, figures: Figures, *lines: str, switch: bool = False) -> Decision:
        self.stage, self.plan, self.chosen, self.settled = Stage.WATCH, plan, figures, True
        self._num_departed = 0
        self._num_steps, self._num_unmeasured = 0, NUM_SETTLE_STEPS if switch else 0
        return self._said(Decision(plan=plan if switch else None, lines=lines))

    def _to(self, stage: Stage, plan: Plan, num_unmeasured: int, *lines: str) -> Decision:
        self.stage, self.plan = stage, plan
        self._num_steps, self._num_unmeasured = 0, num_unmeasured
        return self._said(Decision(plan=plan, lines=lines))

    def _said(self, decision: Decision) -> Decision:
        self.lines += decision.lines
        return decision


def _verdict(trial: _Trial, plan: Plan, figures: Figures, paid: bool) -> str:
    """One line on a plan that was measured."""
    noise_ms = step_noise_ms(trial.before, figures)
    before_ms = trial.before.step_ms
    if not paid:
        verdict = f"slower than the {before_ms:.1f} ms before by more than the noise of {noise_ms:.1f} ms"
    elif figures.step_ms >= before_ms - noise_ms:
        verdict = f"as fast as before ({before_ms:.1f} ms) within the noise of {noise_ms:.1f} ms"
    else:
        verdict = f"{before_ms / figures.step_ms:.2f}x as fast as before ({before_ms:.1f} ms)"
    line = f"measured {figures}: {verdict}"
    if trial.prediction is None or plan != trial.plan:
        return line
    error = trial.prediction.step_ms / figures.step_ms - 1
    remark = ", which is far off" if abs(error) > UNEXPECTED_SHARE else ""
    return f"{line}; predicted {trial.prediction.step_ms:.1f} ms, {100 * error:+.1f} %{remark}"
