"""``--lancet-plan auto`` inside the training loop: runs a :class:`TuningController` from step to step.

All ranks call everything here at the same steps. Every decision is computed from measurements that all ranks have
gathered, or made on rank 0 and broadcast. No rank decides by its own clock.
"""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from megatron_lancet.errors import UsageError
from megatron_lancet.feature import Steering
from megatron_lancet.features.tuning.controller import NO_OVERLAP, PlanningFailed, TuningController, TuningState
from megatron_lancet.features.tuning.pay_off import PayOff
from megatron_lancet.features.tuning.plan_maker import ProfilingPlanMaker
from megatron_lancet.features.tuning.profile_steps import num_steps_left
from megatron_lancet.features.tuning.race import has_kernel
from megatron_lancet.features.tuning.report import speed_up, tuning_text
from megatron_lancet.features.tuning.tuned_plan import ATTRIBUTE, TunedPlan
from megatron_lancet.files.reader import RecordError
from megatron_lancet.plan_words import plan_in_words, plan_text
from megatron_lancet.planning.estimate import StepEstimate
from megatron_lancet.planning.profile import Profile
from megatron_lancet.report.compared import Compared
from megatron_lancet.runtime.collectives import from_all_ranks, from_rank_0
from megatron_lancet.schedule.plan import Plan
from megatron_lancet.training.megatron import checkpoint_patches
from megatron_lancet.training.observe.step_recorder import StepRecorder
from megatron_lancet.training.observe.step_stats import StepStats, StepTimes, steps_of_run
from megatron_lancet.training.overlap_setup import OverlapSetup
from megatron_lancet.training.process.console import say

_KEY = "tuning"
"""In report.json."""
_TUNING = (TuningState.WARM_UP, TuningState.PROFILE, TuningState.RACE)
"""States of steps that a run under a fixed plan would not have."""


class AutoTune(Steering):
    """Tunes a run while it trains."""

    def __init__(
        self,
        args: argparse.Namespace,
        controller: TuningController,
        setup: OverlapSetup,
        recorder: StepRecorder,
        maker: ProfilingPlanMaker,
        short_run_plan: Plan,
        device: torch.device,
        clock_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        """
        Args:
            args: Megatron's arguments; the plan becomes one of them, so that checkpoints contain it.
            setup: switchable; its model starts with the plan without overlap.
            short_run_plan: runs where the training ends before tuning would.
            device: holds the small tensors that the ranks exchange.
            clock_s: seconds; for what tuning cost, on which no decision depends.
        """
        self._args = args
        self._controller = controller
        self._setup = setup
        self._recorder = recorder
        self._maker = maker
        self._short_run_plan = short_run_plan
        self._device = device
        self._clock_s = clock_s
        self._pay_off = PayOff()
        self._tuned_steps: list[list[int]] = []
        self._chosen: StepStats | None = None
        self._made_for: dict[str, str] | None = None
        self._from_checkpoint: str | None = None
        self._started = False
        self._how = ""
        self._num_lines_said = 0
        self._ranks_differ = False  # some have switched to a plan that others can't run
        setattr(args, ATTRIBUTE, None)

    def enter(self, stack: ExitStack) -> None:
        """Reads the plan of a checkpoint that Megatron loads."""
        stack.enter_context(checkpoint_patches.checkpoint_arguments(self.take_from_checkpoint))

    @property
    def profile(self) -> Profile | None:
        """The profile of the newest plan, on rank 0."""
        return self._maker.profile

    def take_from_checkpoint(self, saved_args: Any) -> None:
        """Takes the plan from a checkpoint's arguments, if there is one. To be called before the first step."""
        self._from_checkpoint = getattr(saved_args, ATTRIBUTE, None)

    def observe(self, step: Callable[[], Any]) -> Any:
        """Runs a training step; then profiles, plans or switches as the state of tuning requires."""
        if not self._started:
            self._started = True
            self._start()
            self._say()
        start_s, iteration, controller = self._clock_s(), int(self._args.curr_iteration) + 1, self._controller
        tunes = controller.state in _TUNING
        if controller.state is TuningState.PROFILE:
            result = self._maker.run_step(step)
            self._profile_on()
        else:
            result = step()
            counts = controller.state is not TuningState.FIXED and not self._was_skipped(result)
            if counts and controller.step_done(self._maker.num_micro_batches()):
                self._act(controller.decide(self._measured(controller.num_measured_steps)))
        self._say()
        if tunes:
            self._note_tuned(iteration)
        elapsed_ms = (self._clock_s() - start_s) * 1e3
        self._pay_off.add(iteration, elapsed_ms, controller.compared, not tunes, self._maker.num_micro_batches())
        return result

    def _was_skipped(self, result: Any) -> bool:
        """Whether a step of the warm-up is not to be counted: the optimizer allocates its state in its first own step,
        and a plan is chosen by the memory that is left. Collective in fp16, where steps are skipped until the loss
        scale fits.
        """
        if not self._args.fp16 or self._controller.state is not TuningState.WARM_UP:
            return False
        # Megatron's train_step returns (losses, skipped, ...); a library's step says nothing about the optimizer.
        return any(from_all_ranks(isinstance(result, tuple) and bool(result[1])))

    def _note_tuned(self, iteration: int) -> None:
        """Adds a step to the ranges of steps that tuning used."""
        if self._tuned_steps and self._tuned_steps[-1][1] == iteration - 1:
            self._tuned_steps[-1][1] = iteration
        else:
            self._tuned_steps.append([iteration, iteration])

    def is_settled(self) -> bool:
        """Whether the present step runs by the plan that the run has chosen to keep."""
        return self._controller.state in (TuningState.WATCH, TuningState.FIXED)

    def step_changed(self) -> None:
        """Lets the next steps of the chosen plan be the reference of drift."""
        self._controller.step_changed()

    def summary(self) -> Mapping[str, Any]:
        """How the plan was found, see :func:`~megatron_lancet.features.tuning.report.tuning_text`."""
        controller = self._controller
        won = controller.won
        how = self._how if controller.settled else f"not finished: the run ended during {controller.state}"
        found = {
            "stage": controller.state.value,
            "how": f"{how}; {controller.remark}" if controller.remark else how,
            "num_plans": controller.num_plans,
            "baseline": _asdict(controller.baseline),
            "predicted": _asdict(controller.prediction),
            "chosen": _asdict(controller.chosen),
            "compared": _asdict(controller.compared),
            "kernel_gain": controller.kernel_gain,
            "overlaps": won is not None and not won.overlaps_nothing,
            "won_by": plan_in_words(won).removeprefix(plan_in_words(NO_OVERLAP.plan)).removeprefix(", ") if won else "",
            "has_kernel": won is not None and has_kernel(won),
            "steps": self._tuned_steps,
            "pay_off": None if controller.compared is None else self._pay_off.as_text(controller.compared),
            "lines": controller.lines,
        }
        return {_KEY: found}

    def lines(self, report: Mapping[str, Any]) -> Sequence[str]:
        """The lines on how the plan was found."""
        return tuning_text(report[_KEY])

    def speed_up(self, report: Mapping[str, Any]) -> str:
        """What tuning has brought."""
        return speed_up(report[_KEY])

    @property
    def compared(self) -> Compared | None:
        """See the class of the protocol."""
        return self._controller.compared

    def _start(self) -> None:
        """Decides how to begin, in the first step: by then a checkpoint may have been loaded."""
        controller, args = self._controller, self._args
        made_for = self._maker.made_for()
        if self._from_checkpoint is not None:
            tuned, line = from_rank_0(lambda: self._tuned_plan_that_fits(made_for))
            if tuned is not None:
                self._how = "taken from the checkpoint"
                setattr(args, ATTRIBUTE, self._from_checkpoint)  # until it has been measured
                self._act(controller.take_over(tuned.plan, tuned.baseline, tuned.prediction, line))
                return
            controller.note(line)
        num_left = num_steps_left(args, args.curr_iteration)
        num_needed = controller.num_steps_to_plan(self._maker.num_steps())
        if num_left < num_needed:
            self._how = f"fixed, because {num_left} steps are too few to find one: {num_needed} are needed"
            self._act(controller.give_up(self._short_run_plan, f"{plan_text(self._short_run_plan)} ({self._how})"))
            return
        controller.note(
            f"tunes during the first steps, about {num_needed} and more while plans are close, starting without overlap"
        )

    def _tuned_plan_that_fits(self, made_for: dict[str, str]) -> tuple[TunedPlan | None, str]:
        assert self._from_checkpoint is not None
        try:
            tuned = TunedPlan.from_json(self._from_checkpoint, "the checkpoint's plan")
        except RecordError as error:
            return None, f"{error}: tuning anew"
        misfit = tuned.misfit(made_for)
        if misfit is not None:
            return None, f"the checkpoint's plan was made for another run: {misfit}: tuning anew"
        return tuned, f"{plan_text(tuned.plan)}, from the checkpoint: {tuned.chosen} when it was chosen"

    def _profile_on(self) -> None:
        """Continues the profile after a step, or makes a plan when it is complete."""
        plan, controller = self._maker.next_plan(), self._controller
        if plan == self._setup.plan:
            return
        if controller.profiled is None and not controller.settled:
            # In the first step under a plan saved activations are counted.
            controller.profiled_first(self._setup.plan, self._measured(self._recorder.num_steps - 1))
        if plan is not None and self._switch_for_profile(plan):
            return
        try:
            planned = self._maker.make()
        except PlanningFailed as failure:
            self._how = f"no plan was found: {failure}"
            self._act(self._controller.planning_failed(str(failure)))
            return
        self._how = planned.why
        self._act(self._controller.planned(planned))

    def _switch_for_profile(self, plan: Plan | None) -> bool:
        """Switches to the next plan of the profile that all ranks can run; returns whether there is one."""
        before = self._setup.plan
        while plan is not None and (reason := self._failure(plan)) is not None:
            self._maker.drop(reason)
            self._switch(before)  # where the profile ends, its links are measured under one plan
            plan = self._maker.next_plan()
        return plan is not None

    def _act(self, plan: Plan | None) -> None:
        """Does what the controller has decided: profiles, or switches to ``plan`` if there is one."""
        controller = self._controller
        if controller.state is TuningState.PROFILE:
            self._maker.begin(again=controller.settled)
            has_begun = self._switch_for_profile(self._maker.next_plan())
            assert has_begun
        elif plan is not None:
            while (reason := self._failure(plan)) is not None:
                plan = controller.plan_failed(reason)
        if controller.state is TuningState.WATCH:  # checkpoints contain Megatron's arguments
            assert controller.chosen is not None
            if self._made_for is None or self._chosen is not controller.chosen:  # and not at each window
                self._chosen, self._made_for = controller.chosen, self._maker.made_for()
            kept = TunedPlan(
                controller.plan, self._made_for, controller.chosen, controller.baseline, controller.prediction
            )
            setattr(self._args, ATTRIBUTE, kept.to_json())

    def _failure(self, plan: Plan) -> str | None:
        """Switches to a plan, or says why some rank can't run it. Collective.

        Raises:
            UsageError: the plan is neither profiled nor races, so there is no other in its place.
        """
        if self._controller.state not in (TuningState.PROFILE, TuningState.RACE):
            self._switch(plan)
            return None
        reason: str | None = None
        try:
            self._switch(plan)
        except UsageError as error:
            reason = str(error)
        failed = next((one for one in from_all_ranks(reason) if one is not None), None)
        self._ranks_differ = failed is not None
        return failed

    def _switch(self, plan: Plan) -> None:
        if plan != self._setup.plan or self._ranks_differ:
            self._ranks_differ = False
            self._setup.switch(plan)
        self._recorder.restart()

    def _say(self) -> None:
        """Prints the lines since the last call, once for all ranks."""
        lines = self._controller.lines[self._num_lines_said :]
        self._num_lines_said += len(lines)
        for line in lines:
            say(f"Megatron-Lancet plan: {line}")

    def _measured(self, number: int) -> list[StepTimes]:
        """The last steps, of all ranks together. Collective, unless the number is 0."""
        if number == 0:
            return []
        steps = [
            (record.step_ms, record.comm.exposed_ms + record.comm.counts_exposed_ms, record.comm.all_to_all_ms)
            for record in self._recorder.records[-number:]
        ]
        own = torch.tensor(steps, dtype=torch.float64, device=self._device)
        ranks = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(ranks, own)
        return steps_of_run([[StepTimes(*step) for step in rank.tolist()] for rank in ranks])


def _asdict(stats: StepStats | StepEstimate | Compared | None) -> dict[str, Any] | None:
    return None if stats is None else asdict(stats)
