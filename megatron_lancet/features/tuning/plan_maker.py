"""Profiles a run during its own steps, plans with that profile and keeps it for later runs."""

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.num_microbatches_calculator import get_num_microbatches

from megatron_lancet.config import LancetConfig
from megatron_lancet.features.tuning.controller import Planned, PlanningFailed
from megatron_lancet.features.tuning.flags import TuningFlags
from megatron_lancet.features.tuning.memory_bound import memory_bound_bytes
from megatron_lancet.features.tuning.profile_steps import ProfileSteps, plans_within, profiled_model, with_own_reduction
from megatron_lancet.features.tuning.race import Candidate, with_kernel
from megatron_lancet.features.tuning.reductions import reduction_of
from megatron_lancet.files.reader import RecordError
from megatron_lancet.files.records import to_plain
from megatron_lancet.planning.profile import Profile
from megatron_lancet.planning.search.finalists import NUM_FINALISTS, kind_of, with_another_dispatch
from megatron_lancet.planning.search.gradient_overlap import with_reduction
from megatron_lancet.planning.search.planner import PlannedStep, make_plan
from megatron_lancet.planning.search.search_space import Limits
from megatron_lancet.planning.simulation.cost_model import CostModel
from megatron_lancet.planning.simulation.curve import Curve
from megatron_lancet.planning.simulation.simulator import Simulator
from megatron_lancet.planning.stages import split_at_stages
from megatron_lancet.profiler import cache
from megatron_lancet.profiler.cache import ProfileKey
from megatron_lancet.profiler.facts import ProfiledModel, key_of
from megatron_lancet.profiler.measure import ProfileRun, num_profile_steps
from megatron_lancet.runtime.collectives import from_rank_0
from megatron_lancet.schedule.plan import DwPolicy, Plan, plan_without_overlap
from megatron_lancet.schedule.reductions import GradientReduction
from megatron_lancet.training.overlap_setup import OverlapSetup
from megatron_lancet.training.plan.attention import may_use_sdpa
from megatron_lancet.training.plan.limits import planning_limits
from megatron_lancet.training.plan.memory_budget import least_room_bytes

_NUM_REFRESH_STEPS = 2
"""Traced steps that measure the rows of ranks and the links, when the costs of ops are known."""
MISFIT_SHARE = 0.25
"""A kept profile that is wrong by more than this share of a step, or of a message, is reported: other hosts, another
network, other jobs. Predictions from a profile of the same run are closer."""

LAUNCH_BOUND_SHARE = 0.1
"""A launch-bound share of a step is reported from here on: the user can do more about it than the planner."""


class ProfilingPlanMaker:
    """Profiles during training steps, and makes a plan from the profile.

    All methods are collective: all ranks call them at the same steps.

    Attributes:
        profile: the profile of the last plan, on rank 0; None before, and on other ranks.
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
        no_overlap = Candidate(with_kernel(plan_without_overlap()), "no overlap, fused attention")
        self._kernel = no_overlap if may_use_sdpa(args, config) else None
        self._plans = list(map(self._with_kernel, plans_within(args, config, self._limits)))
        self._cache_dir = config.of(TuningFlags).cache_dir
        self._key: ProfileKey | None = None
        self._steps: ProfileSteps | None = None
        self._plan_before = setup.plan
        self._refreshes = False
        self._is_kept = False
        self._found: Profile | None = None
        self._looked_up = False
        self._num_micro_batches = 0
        self._source = ""
        self.profile: Profile | None = None

    def made_for(self) -> dict[str, str]:
        """The inputs of a plan, by name: model, layout, device, versions, the user's limits."""
        self._key = replace(key_of(self._model()), plans=cache.names_of(self._plans))
        return {**self._key.fields(), "limits": json.dumps(to_plain(self._limits))}

    def num_micro_batches(self) -> int:
        """Micro-batches of a step now: the batch may grow."""
        return get_num_microbatches()

    def num_steps(self) -> int:
        """Training steps that a profile needs; few where there is one already."""
        return 1 + _NUM_REFRESH_STEPS if self._look_up() else num_profile_steps(self._plans)

    def begin(self, again: bool) -> None:
        """Starts a profile. Profiled steps are not paired: a pair's ops alternate, which their times would show.

        If the costs of ops are known, only links and shares of rows are measured: these change from run to run.

        Args:
            again: whether the run has a plan already.
        """
        self._refreshes, self._plan_before = self._look_up(), self._setup.plan
        self._is_kept = self._refreshes and not again
        self._begin()

    def _begin(self) -> None:
        self._found, self._num_micro_batches = None, self.num_micro_batches()
        if self._device.type == "cuda":
            # A step before may have had another attention kernel with a higher peak, which the profile can't predict.
            torch.cuda.reset_peak_memory_stats(self._device)
        if self._refreshes:
            plans = [self._with_kernel(self._plan_before.in_middle)]
            self._steps = ProfileSteps(ProfileRun(self._model(), plans, _NUM_REFRESH_STEPS))
        else:
            self._begin_whole()

    def _begin_whole(self) -> None:
        self._refreshes, self._found = False, None
        self._steps = ProfileSteps(ProfileRun(self._model(), self._plans))
        self._source = f"a profile of {len(self._steps.plans)} steps"

    def next_plan(self) -> Plan | None:
        """The plan for the next profiled step, None when the profile is complete."""
        assert self._steps is not None
        if self._num_micro_batches != (now := self.num_micro_batches()):
            self._note(f"a step has {now} micro-batches now, {self._num_micro_batches} before: profiling anew")
            self._begin()
        if self._steps.next_plan is None and self._found is None:
            found = self._found = self._steps.finish()
            if self._is_kept and from_rank_0(lambda: self._misfits(found)):
                self._begin_whole()
            self._is_kept = False
        return self._steps.next_plan

    def run_step(self, step: Callable[[], Any]) -> Any:
        """Runs a training step, and profiles it."""
        assert self._steps is not None
        return self._steps.run_step(step)

    def drop(self, reason: str) -> None:
        """Leaves the next plan out of the profile, because some rank's model can't run it."""
        assert self._steps is not None
        plan = self._steps.next_plan
        assert plan is not None
        self._note(f"{plan} is not profiled: {reason}")
        if plan.fused_attention and self._steps.num_done == 0:
            self._drop_kernel()
        else:
            self._steps.drop()

    def _drop_kernel(self) -> None:
        """Starts the profile again without the fused attention kernel, because the model can't have it."""
        assert self._key is not None
        self._kernel, self._looked_up = None, False
        self._plans = [replace(plan, fused_attention=False) for plan in self._plans]
        self._key = replace(self._key, plans=cache.names_of(self._plans))
        self.begin(again=False)

    def make(self) -> Planned:
        """Makes the plan on rank 0, and broadcasts it.

        Raises:
            PlanningFailed: no plan could be made; raised on all ranks.
        """
        found = self._found
        assert found is not None
        room_bytes = least_room_bytes(self._device)
        answer = from_rank_0(lambda: self._plan(found, room_bytes))
        if isinstance(answer, str):
            raise PlanningFailed(answer)
        return answer

    def _with_kernel(self, plan: Plan) -> Plan:
        """The plan with the fused attention kernel, if the run may have that.

        Chunks along the sequence have it in any case. Other plans have it too, so that the race compares orders of ops
        and not kernels, and the profile has the kernel's times.
        """
        return plan if self._kernel is None else with_kernel(plan)

    def _model(self) -> ProfiledModel:
        return profiled_model(self._args, self._config, self._setup, self._device)

    def _reduction(self) -> GradientReduction | None:
        return reduction_of(self._args, self._config, self._setup.stages)

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
                cache.keep(self._cache_dir, profile, cache.names_of(self._plans))
        except OSError as error:
            self._note(f"the profile is not kept for later runs: {error}. --lancet-cache names another folder, or off")

    def _refreshed(self, found: Profile) -> Profile:
        """The known profile with new links and rows. Chunks that did not run get rows by the new shares."""
        assert self.profile is not None
        # A batch that grows has more micro-batches by now.
        model = replace(self.profile.model, num_micro_batches=found.model.num_micro_batches)
        routing = found.routing or self.profile.routing  # large groups record none in chunks
        load = found.expert_load or self.profile.expert_load
        shares = found.received_share
        return replace(
            self.profile, model=model, link=found.link, received_share=shares, routing=routing, expert_load=load
        )

    def _misfits(self, found: Profile) -> bool:
        """Compares the profile in the cache with this run, and says where it differs. Called on rank 0.

        Returns:
            Whether its ops take another time here, so that the run needs a profile of its own.
        """
        assert self.profile is not None
        kept, now = self.profile.link.all_to_all, found.link.all_to_all
        if kept and now:
            num_bytes = min(kept[-1][0], now[-1][0])
            kept_ms, now_ms = (Curve(points, flat_below=True).at(num_bytes) for points in (kept, now))
            if abs(kept_ms / now_ms - 1) > MISFIT_SHARE:
                self._note(
                    f"the links of {self._source} no longer fit: a message of {num_bytes / 1e6:.2f} MB took "
                    f"{kept_ms:.2f} ms and takes {now_ms:.2f} ms here, which is used"
                )
        assert self._steps is not None
        plan = self._steps.plans[0]
        measured_ms = found.measured_steps_ms[str(plan)]
        try:
            profile = with_reduction(self._refreshed(found), self._reduction())
            in_stages = split_at_stages(plan, profile.model.stage_of_layer)
            predicted_ms = Simulator(CostModel(profile)).expected_step(in_stages).step_ms
        except RecordError:
            return False  # planning says so
        if abs(predicted_ms / measured_ms - 1) <= MISFIT_SHARE:
            return False
        self._note(
            f"{self._source} no longer fits: a step without overlap takes {measured_ms:.1f} ms here, "
            f"{predicted_ms:.1f} ms by the profile: measuring a new one"
        )
        self.profile = None
        return True

    def _plan(self, found: Profile, room_bytes: int) -> Planned | str:
        """Makes the plan, or returns why there is none. Called on rank 0.

        Args:
            found: the new profile.
            room_bytes: bytes that every rank can allocate beyond its peak in the profiled steps.
        """
        assert self._steps is not None
        start_s = time.perf_counter()
        try:
            if self._refreshes:
                self.profile = self._refreshed(found)
            else:
                self.profile = with_own_reduction(found, self._reduction(), list(dict.fromkeys(self._steps.plans)))
            self._keep(self.profile)
            profile = self.profile = with_reduction(self.profile, self._reduction())
            bound_bytes = memory_bound_bytes(profile, self._steps.plans, room_bytes)
            planned = make_plan(profile, replace(self._limits, max_memory_bytes=bound_bytes))
            simulator = Simulator(CostModel(profile))
            finalists = tuple(
                Candidate(self._with_kernel(plan), prediction=simulator.expected_step(plan))
                for plan in planned.finalists
            )
            no_overlap = split_at_stages(plan_without_overlap(), profile.model.stage_of_layer)
            no_overlap_ms = simulator.expected_step(no_overlap).step_ms
            profiled = self._fast_profiled(planned)
            rival = _other_dispatch((*finalists, *profiled), planned.limits, simulator)
            if rival:
                finalists = finalists[: NUM_FINALISTS - len(profiled)]
        except RecordError as error:
            return f"no plan could be made: {error}"
        except Exception as error:  # noqa: BLE001 training must go on without a plan
            return f"planning failed: {type(error).__name__}: {error}"
        why = f"best of {planned.num_simulated}, planned in {time.perf_counter() - start_s:.1f} s from {self._source}"
        if planned.warning is not None:
            self._note(planned.warning)
        if (line := _line_on_launches(profile)) is not None:
            self._note(line)
        return Planned(finalists, (*profiled, *rival), self._kernel, why, no_overlap_ms)

    def _fast_profiled(self, planned: PlannedStep) -> list[Candidate]:
        """The fastest plan that ran for the profile, if the planner has proposed none of its kind."""
        limits, profile = self._limits, self.profile
        assert profile is not None
        if self._refreshes or DwPolicy.FILL not in limits.dw_policies or False not in limits.pairing:
            return []  # the profiled plans ran otherwise, or are not allowed
        times_ms = profile.measured_steps_ms
        allowed = [
            plan
            for plan in self._plans
            if plan.dispatch in limits.dispatches
            and (limits.tiles is None or plan.segments[0].tiles in limits.tiles)
            and str(plan) in times_ms
        ]
        if not allowed:
            return []
        fastest = min(allowed, key=lambda plan: times_ms[str(plan)])
        return [] if kind_of(fastest) in map(kind_of, planned.finalists) else [Candidate(fastest)]


def _line_on_launches(profile: Profile) -> str | None:
    """Names the profiled plans with the smallest and the largest launch-bound share; None if the latter is small."""
    least_first = sorted(profile.launch_bound.items(), key=lambda one: one[1])
    if not least_first or least_first[-1][1] < LAUNCH_BOUND_SHARE:
        return None
    least, most = (f"{share:.0%} of its time ({plan})" for plan, share in (least_first[0], least_first[-1]))
    return (
        f"a step is launch-bound for {least} to {most}: fewer chunks, larger micro-batches or CUDA graphs help "
        "(docs/gpus.md)"
    )


def _other_dispatch(racers: Sequence[Candidate], limits: Limits, simulator: Simulator) -> list[Candidate]:
    """The first plan with another dispatch, if it fits into memory and all plans have the same dispatch."""
    best = racers[0]
    if best.plan.has_tiles or len({one.plan.dispatch for one in racers}) > 1:
        return []
    assert best.prediction is not None

    def step_ms(plan: Plan) -> float:
        bound = limits.max_memory_bytes
        fits = bound is None or simulator.predict(plan).peak_bytes <= bound
        return simulator.expected_step(plan).step_ms if fits else math.inf

    possible = [dispatch for dispatch in limits.dispatches if simulator.costs.blocker(dispatch) is None]
    other = with_another_dispatch(best.plan, best.prediction.step_ms, possible, step_ms)
    return [] if other is None else [Candidate(other, prediction=simulator.expected_step(other))]
