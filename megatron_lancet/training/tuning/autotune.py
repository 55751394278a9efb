"""``--lancet-plan auto`` inside the training loop: drives :class:`Tuning` from step to step.

All ranks call everything here at the same steps. Every decision is computed from figures that all ranks have
gathered, or made on rank 0 and broadcast. No rank decides by its own clock.
"""

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron_lancet.files import RecordError
from megatron_lancet.planning.estimate import StepEstimate
from megatron_lancet.runtime.collectives import from_rank_0
from megatron_lancet.schedule.plan import Plan
from megatron_lancet.training.observe.step_recorder import StepRecorder
from megatron_lancet.training.overlap_setup import OverlapSetup
from megatron_lancet.training.process.console import say
from megatron_lancet.training.tuning.controller import Decision, Stage, Tuning
from megatron_lancet.training.tuning.step_stats import Figures, StepTimes, figures_of_rank, over_ranks
from megatron_lancet.training.tuning.tuned_plan import ATTRIBUTE, TunedPlan


@dataclass(frozen=True)
class Planned:
    """The result of planning.

    Attributes:
        prediction: step time and exposed communication that the plan is expected to have.
        why: a few words on how the plan was found.
        profiled: step times in ms of plans that ran for the profile, by name.
    """

    plan: Plan
    prediction: StepEstimate
    why: str
    profiled: dict[str, tuple[Plan, float]]


class PlanningFailed(Exception):  # noqa: N818 - its name is what happened
    """No plan could be made; the message says why. The same on all ranks."""


class PlanMaker(Protocol):
    """Profiles during training steps, and makes a plan of it. All methods are called on all ranks at the same steps."""

    def made_for(self) -> dict[str, str]:
        """Names and values of what a plan depends on: model, layout, device, versions, the user's limits."""

    def num_steps(self) -> int:
        """Training steps that a profile needs, 0 where there is one already."""

    def begin(self, again: bool) -> None:
        """Start a profile.

        Args:
            again: the run has a plan already, and has changed since that was made.
        """

    def next_plan(self) -> Plan | None:
        """The plan for the next profiled step, None when the profile is complete."""

    def run_step(self, step: Callable[[], Any]) -> Any:
        """Run a training step, and profile it."""

    def make(self) -> Planned:
        """Make the plan.

        Raises:
            PlanningFailed: no plan could be made; on all ranks.
        """


class AutoTune:
    """Tunes a run while it trains."""

    def __init__(
        self,
        args: argparse.Namespace,
        tuning: Tuning,
        setup: OverlapSetup,
        recorder: StepRecorder,
        maker: PlanMaker,
        short_run_plan: Plan,
        device: torch.device,
    ) -> None:
        """
        Args:
            args: Megatron's; the plan becomes one of them, so that checkpoints contain it.
            setup: switchable; its model runs by the plan without overlap.
            short_run_plan: the plan of a run that ends before tuning would.
            device: of the small tensors that the ranks exchange.
        """
        self._args = args
        self._tuning = tuning
        self._setup = setup
        self._recorder = recorder
        self._maker = maker
        self._short_run_plan = short_run_plan
        self._device = device
        self._from_checkpoint: str | None = None
        self._made_for: dict[str, str] = {}
        self._started = False
        self._how = ""
        self._num_lines_said = 0
        setattr(args, ATTRIBUTE, None)

    def take_from_checkpoint(self, saved_args: Any) -> None:
        """Keep the plan in a checkpoint's arguments, if there is one. To be called before the first step."""
        self._from_checkpoint = getattr(saved_args, ATTRIBUTE, None)

    def observe(self, step: Callable[[], Any]) -> Any:
        """Run a training step; then profile, plan or switch as the stage of tuning requires."""
        if not self._started:
            self._started = True
            self._start()
            self._say()
        if self._tuning.stage is Stage.PROFILE:
            result = self._maker.run_step(step)
            self._profile_on()
        else:
            result = step()
            if self._tuning.stage is not Stage.FIXED and self._tuning.step_done():
                self._act(self._tuning.decide(self._figures()))
        self._say()
        return result

    def is_settled(self) -> bool:
        """Whether the present step runs by the plan that the run has chosen to keep."""
        return self._tuning.stage in (Stage.WATCH, Stage.FIXED)

    def summary(self) -> dict[str, Any]:
        """Figures for the closing report, see :func:`~megatron_lancet.report.tuning.tuning_text`."""
        tuning = self._tuning
        how = self._how if tuning.settled else f"not finished: the run ended during {tuning.stage}"
        return {
            "stage": tuning.stage.value,
            "how": f"{how}; {tuning.remark}" if tuning.remark else how,
            "num_plans": tuning.num_plans,
            "baseline": _asdict(tuning.baseline),
            "predicted": _asdict(tuning.prediction),
            "chosen": _asdict(tuning.chosen),
            "lines": tuning.lines,
        }

    def _start(self) -> None:
        """Decide how to begin, in the first step: by then a checkpoint may have been loaded."""
        tuning, args = self._tuning, self._args
        self._made_for = self._maker.made_for()
        if self._from_checkpoint is not None:
            tuned, line = from_rank_0(self._tuned_plan_that_fits)
            if tuned is not None:
                self._how = "taken from the checkpoint"
                self._act(tuning.take_over(tuned.plan, tuned.baseline, tuned.prediction, line))
                return
            tuning.note(line)
        num_left, num_needed = args.train_iters - args.curr_iteration, tuning.num_steps_to_plan(self._maker.num_steps())
        if num_left < num_needed:
            self._how = f"fixed, because {num_left} steps are too few to find one: {num_needed} are needed"
            self._act(tuning.give_up(self._short_run_plan, f"{self._short_run_plan} ({self._how})"))
            return
        tuning.note(f"tunes during the first {num_needed} steps, starting without overlap")

    def _tuned_plan_that_fits(self) -> tuple[TunedPlan | None, str]:
        assert self._from_checkpoint is not None
        try:
            tuned = TunedPlan.from_json(self._from_checkpoint, "the checkpoint's plan")
        except RecordError as error:
            return None, f"{error}: tuning anew"
        misfit = tuned.misfit(self._made_for)
        if misfit is not None:
            return None, f"the checkpoint's plan was made for another run: {misfit}: tuning anew"
        return tuned, f"{tuned.plan}, from the checkpoint: {tuned.chosen} when it was chosen"

    def _profile_on(self) -> None:
        """Continue the profile, or make a plan when it is complete."""
        plan = self._maker.next_plan()
        if plan is not None:
            self._switch(plan)
            return
        try:
            planned = self._maker.make()
        except PlanningFailed as failure:
            self._how = f"no plan was found: {failure}"
            self._act(self._tuning.planning_failed(str(failure)))
            return
        self._how = planned.why
        self._act(self._tuning.planned(planned.plan, planned.prediction, planned.profiled, planned.why))

    def _act(self, decision: Decision) -> None:
        if decision.make_plan:
            self._maker.begin(again=self._tuning.settled)
            self._profile_on()
        elif decision.plan is not None:
            self._switch(decision.plan)
        self._remember()

    def _switch(self, plan: Plan) -> None:
        if plan != self._setup.plan:
            self._setup.switch(plan)
        self._recorder.restart()

    def _remember(self) -> None:
        """Put the plan into Megatron's arguments, which checkpoints contain."""
        tuning = self._tuning
        if tuning.stage is Stage.WATCH:
            assert tuning.chosen is not None
            tuned = TunedPlan(tuning.plan, self._made_for, tuning.chosen, tuning.baseline, tuning.prediction)
            setattr(self._args, ATTRIBUTE, tuned.to_json())

    def _say(self) -> None:
        """Print the lines since the last call, once for all ranks."""
        lines = self._tuning.lines[self._num_lines_said :]
        self._num_lines_said += len(lines)
        for line in lines:
            say(f"Megatron-Lancet plan: {line}")

    def _figures(self) -> Figures:
        """Median figures of the last steps over all ranks. Collective."""
        steps = [
            StepTimes(record.step_ms, record.comm.exposed_ms + record.comm.counts_exposed_ms, record.comm.all_to_all_ms)
            for record in self._recorder.records[-self._tuning.num_tune_steps :]
        ]
        row = torch.tensor(figures_of_rank(steps).as_row(), dtype=torch.float64, device=self._device)
        rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, row)
        return over_ranks([row.tolist() for row in rows])


def _asdict(figures: Figures | StepEstimate | None) -> dict[str, Any] | None:
    return None if figures is None else asdict(figures)
