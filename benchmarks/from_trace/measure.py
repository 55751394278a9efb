"""In turns: stock under torch.profiler, a profile of our own, and plans; then both profiles and their predictions."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from benchmarks.from_trace.cases import PLANNED
from benchmarks.harness.bench import CpuWatch, RankSamples, say
from benchmarks.harness.cases import Case, Variant, rotated
from benchmarks.harness.job import Job
from benchmarks.prediction.cases import FIXED_PLANS
from benchmarks.prediction.measure import PredictionBench
from benchmarks.training_step.links import Link
from benchmarks.training_step.sample import SAMPLE_FIELDS, on_all_ranks
from benchmarks.training_step.step import Step
from megatron_lancet.files.records import to_plain
from megatron_lancet.lab.from_trace.profile import profile_from_traces
from megatron_lancet.planning.profile import Profile
from megatron_lancet.planning.search.planner import make_plan
from megatron_lancet.planning.simulation.cost_model import CostModel
from megatron_lancet.planning.simulation.simulator import Simulator
from megatron_lancet.profiler.measure import ProfileRun, plans_to_profile
from megatron_lancet.schedule.plan import Plan

STOCK = "stock"
_IN_A_TURN = 2
"""Traced or measured steps in a turn; the one before them is a warm-up on a fast link."""


class _StockLink(Link):
    """A link that leaves stock's all-to-alls to Megatron and gloo; their groups are on the shaped interface."""

    @contextmanager
    def carries_stock(self) -> Iterator[None]:
        yield


class _Traces:
    """Traces of stock steps, as Megatron's ``--profile --use-pytorch-profiler`` records them."""

    def __init__(self, folder: Path, case: str) -> None:
        self._folder = folder
        self._case = case
        self._number = 0

    @property
    def paths(self) -> list[Path]:
        """Those of all ranks. Collective: all ranks have written theirs."""
        dist.barrier()
        return sorted(self._folder.glob(f"trace-{self._case}-*.json"))

    @contextmanager
    def recording(self) -> Iterator[torch.profiler.profile]:
        """Records the steps that ``step`` of the profiler inside separates, behind a warm-up."""
        path = self._folder / f"trace-{self._case}-{self._number}-rank-{dist.get_rank()}.json"
        self._number += 1
        with torch.profiler.profile(
            schedule=torch.profiler.schedule(wait=0, warmup=1, active=_IN_A_TURN, repeat=1),
            on_trace_ready=lambda profile: profile.export_chrome_trace(str(path)),
            record_shapes=True,
        ) as profile:
            yield profile


class FromTraceBench(PredictionBench):
    """Compares what is read from traces of stock with what our profiler measures, and both with real steps."""

    def __init__(self, job: Job, shaped: str, free: str, timeout: timedelta) -> None:
        """Collective; see :class:`Bench`."""
        super().__init__(job, shaped, free, timeout)
        self._stock_link = _StockLink(shaped, parallel_state.get_expert_model_parallel_group(), timeout)

    def measure(self, case: Case) -> dict[str, Any]:
        """Everything about a case, for the JSON file."""
        say(f"case {case.name}: {case.title}")
        self.warm_up()
        variant = Variant("k1", FIXED_PLANS["k1-dw"], "")
        weights, self._expected = self._stock(case)
        step = Step(case.shape, variant, self._link(case), weights)
        step.run_by(FIXED_PLANS["k1"])
        step.run()
        stock = Step(case.shape, Variant(STOCK, None), self._stock_link, weights)
        stock.run()
        self._rate_bps = self.set_rate_for(case, step, step)
        traces = _Traces(self.job.result.parent, case.name)
        watch = CpuWatch(self.job.cores)
        self._record(traces, stock)
        planned = make_plan(profile_from_traces(traces.paths)).plan
        say(f"  planned from the first traces: {planned}")
        plans = {name: planned if name == PLANNED else FIXED_PLANS[name] for name in case.variants}
        own, samples = self._in_rounds(case, step, stock, traces, plans)
        seen = watch.seen(f"{self.job.repeats} repeats at {self._rate_bps / 1e6:.0f} Mbit/s")
        # The timed region of a step has no loop around it, and no optimizer.
        read = replace(profile_from_traces(traces.paths), rest_ms=own.rest_ms)
        return {
            **asdict(case),
            "rate_bps": self._rate_bps,
            "plans": {name: to_plain(plan) for name, plan in plans.items()},
            "disturbance": seen,
            "own_profile": to_plain(own),
            "trace_profile": to_plain(read),
            "own_predictions": _predictions(own, plans),
            "trace_predictions": _predictions(read, plans),
            "sample_fields": SAMPLE_FIELDS,
            "samples": samples,
        }

    def _record(self, traces: _Traces, stock: Step) -> list[RankSamples]:
        """A turn of stock steps under torch.profiler. Collective."""
        samples = []
        with traces.recording() as profile:
            self.warm_up()
            stock.run()
            self._shape_again()
            for _ in range(_IN_A_TURN):
                profile.step()
                samples.append(on_all_ranks(stock.run()[0]))
            profile.step()
        return samples

    def _turn(self, name: str, plan: Plan | None, step: Step) -> list[RankSamples]:
        """A turn of steps of stock, or of a plan. Collective."""
        if plan is None:
            self.warm_up()
            step.run()
            self._shape_again()
        else:
            self._warm_up_by(name, plan, step)
        return [on_all_ranks(step.run()[0]) for _ in range(_IN_A_TURN)]

    def _in_rounds(
        self, case: Case, step: Step, stock: Step, traces: _Traces, plans: Mapping[str, Plan]
    ) -> tuple[Profile, dict[str, list[RankSamples]]]:
        """Rounds of the profile's plans, traces and configurations, so that all see the same machine."""
        shape = case.shape
        profiled = plans_to_profile(shape.micro_batch, shape.seq_length)
        num_rounds = math.ceil(self.job.repeats / _IN_A_TURN)
        run = ProfileRun(self._profiled(case, step), profiled * num_rounds, _IN_A_TURN)
        samples: dict[str, list[RankSamples]] = {name: [] for name in (STOCK, *plans)}
        for num_round in range(num_rounds):
            in_round = len(profiled) * (1 + _IN_A_TURN)
            for place in range(in_round):
                self._profile_step(run, num_round * in_round + place, place % (1 + _IN_A_TURN) == 0, step)
            self._record(traces, stock)
            for name in rotated(list(samples), num_round):
                samples[name] += self._turn(name, plans.get(name), stock if name == STOCK else step)
        return run.finish(), samples


def _predictions(profile: Profile, plans: Mapping[str, Plan]) -> dict[str, Any]:
    simulator = Simulator(CostModel(profile))
    return {name: asdict(simulator.expected_step(plan)) for name, plan in plans.items()}


BENCH = FromTraceBench
