"""Profiles a run during its own steps, plans with that profile and keeps it for later runs."""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from megatron_lancet.config import LancetConfig
from megatron_lancet.files import RecordError, to_plain
from megatron_lancet.planning.profile import Profile
from megatron_lancet.planning.search.gradient_overlap import with_reduction
from megatron_lancet.planning.search.planner import PlannedStep, make_plan
from megatron_lancet.planning.simulation.cost_model import CostModel
from megatron_lancet.planning.simulation.simulator import Simulator
from megatron_lancet.profiler import cache
from megatron_lancet.profiler.cache import ProfileKey
from megatron_lancet.profiler.facts import ProfiledModel, key_of
from megatron_lancet.profiler.measure import ProfileRun, num_profile_steps
from megatron_lancet.runtime.collectives import from_rank_0
from megatron_lancet.schedule.plan import DwPolicy, Plan
from megatron_lancet.training.overlap_setup import OverlapSetup
from megatron_lancet.training.plan.limits import planning_limits
from megatron_lancet.training.plan.reductions import reduction_of
from megatron_lancet.training.tuning.controller import Planned, PlanningFailed
from megatron_lancet.training.tuning.memory_budget import least_room_bytes, memory_bound_bytes
from megatron_lancet.training.tuning.profile_steps import ProfileSteps, plans_within, profiled_model, with_own_reduction

_NUM_REFRESH_STEPS = 2
"""Traced steps that measure the shares of rows and the links, when the costs of ops are known."""


class ProfilingPlanMaker:
    """Profiles during training steps, and makes a plan from the profile.

    All methods are collective: all ranks call them at the same steps.

    Attributes:
        profile: the profile of the last plan, on rank 0; None before, and on other ranks.
        planned: the planner's answer, on rank 0.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        config: LancetConfig,
        setup: OverlapSetup,
        device: torch.device,
        note: Callable[[str], None],
    ) -> None:
        """Computes the planner's limits; ``note`` prints a line for the user.

        Raises:
            UsageError: the user asks for something that the run does not allow.
        """
        self._args = args
        self._config = config
        self._setup = setup
        self._device = device
        self._note = note
        self._limits = planning_limits(args, config)
        self._plans = plans_within(args, config, self._limits)
        self._cache_dir = config.cache_dir
        self._reduction = reduction_of(args, config)
        self._key: ProfileKey | None = None
        self._steps: ProfileSteps | None = None
        self._plan_before = setup.plan
        self._refreshes = False
        self._looked_up = False
        self._source = ""
        self.profile: Profile | None = None
        self.planned: PlannedStep | None = None

    def made_for(self) -> dict[str, str]:
        """The inputs of a plan, by name: model, layout, device, versions, the user's limits."""
        self._key = key_of(self._model())
        return {**self._key.fields(), "limits": json.dumps(to_plain(self._limits))}

    def num_steps(self) -> int:
        """Training steps that a profile needs, 0 where there is one already."""
        return 0 if self._look_up() else num_profile_steps(self._plans)

    def begin(self, again: bool) -> None:
        """Starts a profile. Profiled steps are not paired: a pair's ops alternate, which their times would show.

        Args:
            again: whether the run has a plan already: if its ops are known, only links and shares of rows are measured.
        """
        is_known = self._look_up()
        self._steps, self._refreshes, self._plan_before = None, again and is_known, self._setup.plan
        if self._refreshes:
            self._steps = ProfileSteps(ProfileRun(self._model(), [self._setup.plan.in_middle], _NUM_REFRESH_STEPS))
        elif not is_known:
            self._steps = ProfileSteps(ProfileRun(self._model(), self._plans))
        if self._steps is not None:
            self._source = f"a profile of {len(self._steps.plans)} steps"

    def next_plan(self) -> Plan | None:
        """The plan for the next profiled step, None when the profile is complete."""
        return self._steps.next_plan if self._steps is not None else None

    def run_step(self, step: Callable[[], Any]) -> Any:
        """Runs a training step, and profiles it."""
        assert self._steps is not None
        return self._steps.run_step(step)

    def make(self) -> Planned:
        """Makes the plan on rank 0, and broadcasts it.

        Raises:
            PlanningFailed: no plan could be made; raised on all ranks.
        """
        found = self._steps.finish() if self._steps is not None else None
        room_bytes = least_room_bytes(self._device)
        answer = from_rank_0(lambda: self._plan(found, room_bytes))
        if isinstance(answer, str):
            raise PlanningFailed(answer)
        return answer

    def _model(self) -> ProfiledModel:
        return profiled_model(self._args, self._config, self._setup, self._device)

    def _look_up(self) -> bool:
        """Whether rank 0 has a profile already, from this run or from the cache."""
        return from_rank_0(self._look_up_on_rank_0)

    def _look_up_on_rank_0(self) -> bool:
        if not self._looked_up and self._cache_dir is not None:
            assert self._key is not None
            self._looked_up = True
            try:
                self.profile = cache.load(self._cache_dir, self._key)
            except (RecordError, OSError) as error:
                self._note(f"the profile in the cache can't be used: {error}")
            if self.profile is not None:
                self._source = f"the profile {self._key.path(self._cache_dir)}"
        return self.profile is not None

    def _keep(self, profile: Profile) -> None:
        try:
            if self._cache_dir is not None:
                cache.keep(self._cache_dir, profile)
        except OSError as error:
            self._note(f"the profile is not kept for later runs: {error}. --lancet-cache names another folder, or off")

    def _plan(self, found: Profile | None, room_bytes: int) -> Planned | str:
        """Makes the plan, or returns why there is none. Called on rank 0.

        Args:
            found: the new profile, if there was one to measure.
            room_bytes: bytes that every rank can allocate beyond its peak so far.
        """
        if found is not None and self._refreshes:
            assert self.profile is not None
            # A batch that grows has more micro-batches by now.
            model = replace(self.profile.model, num_micro_batches=found.model.num_micro_batches)
            self.profile = replace(self.profile, model=model, link=found.link, received_share=found.received_share)
        start_s = time.perf_counter()
        try:
            if found is not None and not self._refreshes:
                self.profile = with_own_reduction(found, self._reduction, self._plans)
                self._keep(self.profile)
            assert self.profile is not None
            profile = self.profile = with_reduction(self.profile, self._reduction)
            ran = [self._plan_before, *(self._steps.plans if self._steps is not None else ())]
            bound_bytes = memory_bound_bytes(profile, ran, room_bytes)
            planned = make_plan(profile, replace(self._limits, max_memory_bytes=bound_bytes))
            prediction = Simulator(CostModel(profile)).expected_step(planned.plan)
        except RecordError as error:
            return f"no plan could be made: {error}"
        except Exception as error:  # noqa: BLE001 training must go on without a plan
            return f"planning failed: {type(error).__name__}: {error}"
        self.planned = planned
        why = f"best of {planned.num_simulated}, planned in {time.perf_counter() - start_s:.1f} s from {self._source}"
        if planned.warning is not None:
            self._note(planned.warning)
        limits = self._limits
        if self._refreshes or DwPolicy.FILL not in limits.dw_policies or False not in limits.pairing:
            return Planned(planned.plan, prediction, why)  # the profiled plans ran otherwise, or are not allowed
        times_ms = profile.measured_steps_ms
        allowed = [
            plan
            for plan in self._plans
            if plan.dispatch in limits.dispatches and (limits.tiles is None or plan.segments[0].tiles in limits.tiles)
        ]
        profiled = {name: (plan, times_ms[name]) for plan in allowed if (name := str(plan)) in times_ms}
        return Planned(planned.plan, prediction, why, profiled)
