"""Profiles a case's model on its link and runs the configurations between the steps of the profile."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness.bench import TOLERANCE, Bench, CpuWatch, RankSamples, largest_error, say
from benchmarks.harness.cases import Case, Variant, rotated, sums_as_stock
from benchmarks.prediction.cases import FIXED_PLANS, PLANNED
from benchmarks.training_step.links import CPU, Link
from benchmarks.training_step.model import BUCKET_PARAMETERS
from benchmarks.training_step.sample import SAMPLE_FIELDS, on_all_ranks
from benchmarks.training_step.step import Step
from megatron_lancet.files.records import to_plain
from megatron_lancet.lab.views.clocks import aligned
from megatron_lancet.lab.views.trace_file import write_trace
from megatron_lancet.planning.profile import Profile
from megatron_lancet.planning.search.gradient_overlap import measured_with
from megatron_lancet.planning.search.planner import make_plan
from megatron_lancet.planning.simulation.cost_model import CostModel
from megatron_lancet.planning.simulation.simulator import Simulation, Simulator
from megatron_lancet.profiler.facts import ProfiledModel
from megatron_lancet.profiler.measure import NUM_TRACED_STEPS, ProfileRun, plans_to_profile
from megatron_lancet.report.timeline_record import TimelineRecord
from megatron_lancet.runtime.trace import Trace
from megatron_lancet.schedule.dispatch import Dispatch
from megatron_lancet.schedule.plan import ChunkDim, Plan
from megatron_lancet.schedule.reductions import GradientReduction
from megatron_lancet.schedule.timeline import RankTimeline


class PredictionBench(Bench):
    """Measures one model that is switched between plans, and predicts each of them from a profile of it."""

    _rate_bps: float | None
    """None on the link that is not shaped."""
    _expected: dict[str, torch.Tensor]
    """Stock's loss and gradients; empty where the optimizer changes the weights from step to step."""

    def measure(self, case: Case) -> dict[str, Any]:
        """Everything about a case, for the JSON file."""
        say(f"case {case.name}: {case.title}")
        self.warm_up()
        variant = Variant("k1", FIXED_PLANS["k1-dw"], "", overlaps_reduction=case.optimizer)
        weights, self._expected = self._stock(case)
        step = Step(case.shape, variant, self._link(case), weights, has_optimizer=case.optimizer)
        step.run()
        step.take_expert_shares()
        step.run_by(FIXED_PLANS["k1"])
        step.run()
        shares = step.take_expert_shares()
        self._rate_bps = rate_bps = None if case.exposed_share is None else self.set_rate_for(case, step, step)
        watch = CpuWatch(self.job.cores)
        plans = {name: self._plan(name, case, step) for name in case.variants}
        profile, samples = self._profile_in_turns(case, step, plans)
        rate = "any rate" if rate_bps is None else f"{rate_bps / 1e6:.0f} Mbit/s"
        seen = watch.seen(f"{self.job.repeats} repeats at {rate}")
        simulator = Simulator(CostModel(profile))
        simulations = {name: simulator.simulate(plan) for name, plan in plans.items()}
        self._write_timelines(case, step, plans, simulations)
        expected = {name: simulator.expected_step(plan) for name, plan in plans.items()}
        return {
            **asdict(case),
            "rate_bps": rate_bps,
            "expert_shares": shares,
            "plans": {name: to_plain(plan) for name, plan in plans.items()},
            "disturbance": seen,
            "profile": to_plain(profile),
            "predictions": {
                name: {**asdict(simulation.prediction), "expected": asdict(expected[name])}
                for name, simulation in simulations.items()
            },
            "sample_fields": SAMPLE_FIELDS,
            "samples": samples,
        }

    def _link(self, case: Case) -> Link:
        return self.links[case.exposed_share is None]

    def _shape_again(self) -> None:
        """The case's rate, after a step on a fast link. Collective."""
        if self._rate_bps is not None:
            self._set_rate(self._rate_bps)

    def _stock(self, case: Case) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """The weights of stock's model, and the loss and the gradients of a step of it."""
        step = Step(case.shape, Variant("stock", None), self._link(case), None)
        weights = {key: value.clone() for key, value in step.module.state_dict().items() if value is not None}
        if case.optimizer:
            return weights, {}
        _, loss = step.run()
        return weights, {"loss": loss, **{name: grad.clone() for name, grad in step.gradients().items()}}

    def _warm_up_by(self, name: str, plan: Plan, step: Step) -> None:
        """A step on a fast link: memory is of the other plan's sizes. Its gradients are compared with stock's."""
        step.run_by(plan)
        self.warm_up()
        _, loss = step.run()
        if self._expected:
            tolerance = 0.0 if sums_as_stock(plan, step.shape.topk) else TOLERANCE
            largest_error(name, {"loss": loss, **step.gradients()}, self._expected, "stock", tolerance)
        self._shape_again()

    def _profile_step(self, run: ProfileRun, index: int, is_first: bool, step: Step) -> None:
        """A step of a profile. The first one of a plan is not timed, so it runs on a fast link."""
        if is_first:
            step.run_by(run.plans[index])
            self.warm_up()
        step.run(around=partial(run.step, index))
        if is_first:
            self._shape_again()

    def _plan(self, name: str, case: Case, step: Step) -> Plan:
        """A fixed one, or the planner's for a profile of its own, which is made as a run makes it."""
        if name != PLANNED:
            return FIXED_PLANS[name]
        num_traced = 1 if _is_accumulated(case) else NUM_TRACED_STEPS
        run = ProfileRun(self._profiled(case, step), _profiled_plans(case), num_traced)
        for index in range(len(run.plans)):
            self._profile_step(run, index, index % (1 + num_traced) == 0, step)
        plan = make_plan(self._finished(run, case)).plan
        say(f"  planned: {plan}")
        return plan

    @staticmethod
    def _finished(run: ProfileRun, case: Case) -> Profile:
        """The profile, as a run with or without overlap-grad-reduce makes it."""
        profile = run.finish()
        if not case.optimizer:
            return profile
        reduction = GradientReduction(dense_ranks=dist.get_world_size(), bucket_bytes=4 * BUCKET_PARAMETERS)
        return measured_with(profile, reduction, list(dict.fromkeys(run.plans)))

    @staticmethod
    def _profiled(case: Case, step: Step) -> ProfiledModel:
        shape = case.shape
        return ProfiledModel((step.module,), CPU, shape.micro_batch, shape.seq_length, shape.micro_batches)

    def _profile_in_turns(
        self, case: Case, step: Step, plans: Mapping[str, Plan]
    ) -> tuple[Profile, dict[str, list[RankSamples]]]:
        """A profile as a run takes it, and the configurations, in rounds that hold each plan of both once.

        So all see the same machine: its speed may drift by more than what is to be found out. The order rotates.
        """
        in_one_round, in_a_turn = _profiled_plans(case), _samples_in_a_turn(case)
        num_rounds = math.ceil(self.job.repeats / in_a_turn)
        run = ProfileRun(self._profiled(case, step), in_one_round * num_rounds, in_a_turn)
        samples: dict[str, list[RankSamples]] = {name: [] for name in plans}
        for index in range(len(run.plans)):
            self._profile_step(run, index, index % (1 + in_a_turn) == 0, step)
            done, is_inside = divmod(index + 1, 1 + in_a_turn)
            if is_inside:
                continue
            num_round, place = divmod(done - 1, len(in_one_round))
            names = rotated(list(plans), num_round)
            start, end = (at * len(names) // len(in_one_round) for at in (place, place + 1))
            for name in names[start:end]:
                self._warm_up_by(name, plans[name], step)
                samples[name] += [on_all_ranks(step.run()[0]) for _ in range(in_a_turn)]
        return self._finished(run, case), samples

    def _write_timelines(
        self, case: Case, step: Step, plans: Mapping[str, Plan], simulations: Mapping[str, Simulation]
    ) -> None:
        """One traced step of each configuration next to what was predicted for it, if asked for."""
        if self.job.timelines is None:
            return
        trace = Trace(CPU, dist.get_rank())
        for name, plan in plans.items():
            step.run_by(plan)
            found: list[RankTimeline] = []
            step.run(around=partial(self._traced, step, trace, found))
            everyone: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, found[0])
            if dist.get_rank() == 0:
                record = TimelineRecord(f"{case.name} {name}", aligned(everyone, ()), simulations[name].timelines)
                write_trace(record, self.job.timelines / f"{case.name}-{name}.json")

    @staticmethod
    @contextmanager
    def _traced(step: Step, trace: Trace, found: list[RankTimeline]) -> Iterator[None]:
        comm = step.module.decoder.comm
        comm.record_to(trace)
        trace.begin_step()
        try:
            yield
            found.append(trace.end_step().timeline)
        finally:
            comm.record_to(None)


def _is_accumulated(case: Case) -> bool:
    return case.shape.micro_batches > 1


def _samples_in_a_turn(case: Case) -> int:
    """Traced steps of each of the profile's plans in a round, and measured steps of each configuration."""
    return 1 if _is_accumulated(case) else 2


def _profiled_plans(case: Case) -> list[Plan]:
    """The plans of a run's profile; where steps are long only one chunk and two batch chunks."""
    sizes = case.shape.micro_batch, case.shape.seq_length
    dispatches = [one for one in Dispatch.known().values() if case.why_not(one) is None]
    profiled = partial(plans_to_profile, *sizes, dispatches=dispatches, has_tiles=True)
    return profiled([ChunkDim.BATCH], chunk_counts=[2]) if _is_accumulated(case) else profiled()


BENCH = PredictionBench
