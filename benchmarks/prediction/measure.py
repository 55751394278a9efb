"""Profiles a case's model on its link and runs the configurations between the steps of the profile."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

import torch.distributed as dist

from benchmarks.harness.bench import Bench, CpuWatch, RankSamples, say
from benchmarks.harness.cases import Case, Shape, Variant, rotated
from benchmarks.prediction.cases import FIXED_PLANS, PLANNED
from benchmarks.training_step.links import CPU
from benchmarks.training_step.model import BUCKET_PARAMETERS
from benchmarks.training_step.sample import SAMPLE_FIELDS, on_both_ranks
from benchmarks.training_step.step import Step
from megatron_lancet.files import to_plain
from megatron_lancet.model.gpt import set_plan
from megatron_lancet.planning.profile import Profile
from megatron_lancet.planning.search.gradient_overlap import measured_with
from megatron_lancet.planning.search.planner import make_plan
from megatron_lancet.planning.simulation.cost_model import CostModel
from megatron_lancet.planning.simulation.simulator import Simulation, Simulator
from megatron_lancet.profiler.facts import ProfiledModel
from megatron_lancet.profiler.measure import ProfileRun, plans_to_profile
from megatron_lancet.report.timeline.clocks import aligned
from megatron_lancet.report.timeline.record import TimelineRecord
from megatron_lancet.report.timeline.trace_file import write_trace
from megatron_lancet.runtime.trace import Trace
from megatron_lancet.schedule.plan import Plan
from megatron_lancet.schedule.reductions import GradientReduction
from megatron_lancet.schedule.timeline import RankTimeline

_SAMPLES_IN_A_TURN = 2
"""Traced steps of each of the profile's plans in a round, and measured steps of each configuration."""


class PredictionBench(Bench):
    """Measures one model that is switched between plans, and predicts each of them from a profile of it."""

    def measure(self, case: Case) -> dict[str, Any]:
        """Everything about a case, for the JSON file."""
        say(f"case {case.name}: {case.title}")
        self.warm_up()
        variant = Variant("k1", FIXED_PLANS["k1-dw"], "", overlaps_reduction=case.optimizer)
        step = Step(case.shape, variant, self.links[False], None, has_optimizer=case.optimizer)
        step.run()
        step.take_expert_shares()
        set_plan(step.module, FIXED_PLANS["k1"])
        step.run()
        shares = step.take_expert_shares()
        rate_bps = self.set_rate_for(case, step, step)
        watch = CpuWatch(self.job.cores)
        plans = {name: self._plan(name, case, step) for name in case.variants}
        profile, samples = self._profile_in_turns(case, step, plans)
        seen = watch.seen(f"{self.job.repeats} repeats at {rate_bps / 1e6:.0f} Mbit/s")
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

    def _plan(self, name: str, case: Case, step: Step) -> Plan:
        """A fixed one, or the planner's for a profile of its own, which is made as a run makes it."""
        if name != PLANNED:
            return FIXED_PLANS[name]
        run = ProfileRun(self._profiled(case.shape, step))
        for index, plan in enumerate(run.plans):
            set_plan(step.module, plan)
            step.run(around=partial(run.step, index))
        return make_plan(self._finished(run, case)).plan

    @staticmethod
    def _finished(run: ProfileRun, case: Case) -> Profile:
        """The profile, as a run with or without overlap-grad-reduce makes it."""
        profile = run.finish()
        if not case.optimizer:
            return profile
        reduction = GradientReduction(dense_ranks=dist.get_world_size(), bucket_bytes=4 * BUCKET_PARAMETERS)
        return measured_with(profile, reduction, list(dict.fromkeys(run.plans)))

    @staticmethod
    def _profiled(shape: Shape, step: Step) -> ProfiledModel:
        return ProfiledModel((step.module,), CPU, shape.micro_batch, shape.seq_length, 1)

    def _profile_in_turns(
        self, case: Case, step: Step, plans: Mapping[str, Plan]
    ) -> tuple[Profile, dict[str, list[RankSamples]]]:
        """A profile as a run takes it, and the configurations, in rounds that hold each plan of both once.

        So all see the same machine: its speed may drift by more than what is to be found out. The order rotates.
        """
        in_one_round = plans_to_profile(case.shape.micro_batch, case.shape.seq_length)
        num_rounds = math.ceil(self.job.repeats / _SAMPLES_IN_A_TURN)
        run = ProfileRun(self._profiled(case.shape, step), in_one_round * num_rounds, _SAMPLES_IN_A_TURN)
        samples: dict[str, list[RankSamples]] = {name: [] for name in plans}
        for index, plan in enumerate(run.plans):
            set_plan(step.module, plan)
            step.run(around=partial(run.step, index))
            done, is_inside = divmod(index + 1, 1 + _SAMPLES_IN_A_TURN)
            if is_inside:
                continue
            num_round, place = divmod(done - 1, len(in_one_round))
            names = rotated(list(plans), num_round)
            start, end = (at * len(names) // len(in_one_round) for at in (place, place + 1))
            for name in names[start:end]:
                samples[name] += self._turn(step, plans[name])
        return self._finished(run, case), samples

    @staticmethod
    def _turn(step: Step, plan: Plan) -> list[RankSamples]:
        """The first step after a switch is not measured, nor does the profile: memory is of the other plan's sizes."""
        set_plan(step.module, plan)
        step.run()
        return [on_both_ranks(step.run()[0]) for _ in range(_SAMPLES_IN_A_TURN)]

    def _write_timelines(
        self, case: Case, step: Step, plans: Mapping[str, Plan], simulations: Mapping[str, Simulation]
    ) -> None:
        """One traced step of each configuration beside what was predicted for it, if asked for."""
        if self.job.timelines is None:
            return
        trace = Trace(CPU, dist.get_rank())
        for name, plan in plans.items():
            set_plan(step.module, plan)
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


BENCH = PredictionBench
