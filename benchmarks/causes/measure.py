"""Runs traced steps with and without an injected cause in turns, and finds the causes of each."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import torch.distributed as dist

from benchmarks.causes.cases import BASELINE, PLANS, SIZES
from benchmarks.causes.inject import Biases, Injection, biases_of
from benchmarks.harness.bench import Bench, CpuWatch, say
from benchmarks.harness.cases import Case, Variant
from benchmarks.training_step.links import CPU
from benchmarks.training_step.sample import SAMPLE_FIELDS, on_all_ranks
from benchmarks.training_step.step import Step
from megatron_lancet.files.records import to_plain
from megatron_lancet.lab.causes.replay import Cause
from megatron_lancet.lab.causes.step import causes_of_group, link_kind, traced_rank
from megatron_lancet.lab.causes.traced import TracedRank
from megatron_lancet.runtime.trace import Trace

_WARM_UP_STEPS = 1
"""In a run, with and without the cause."""


class CausesBench(Bench):
    """One model for all cases; a run of a case has one size of its cause, and one plan."""

    _ready: tuple[Step, float] | None = None
    _biases: dict[float | None, Biases]

    def measure(self, case: Case) -> dict[str, Any]:
        """Everything about a case, for the JSON file."""
        say(f"case {case.name}: {case.title}")
        step, rate_bps = self._ready_for(case)
        cause = Cause(case.name)
        if cause is Cause.ROWS:
            self._make_biases(case)
        runs = []
        for index, size in enumerate(SIZES[cause][: self.job.sweeps]):
            plan = list(PLANS)[index % len(PLANS)]
            step.run_by(PLANS[plan])
            injection = Injection(cause, size, step.module, self._biases, self._set_rate, rate_bps)
            watch = CpuWatch(self.job.cores)
            with injection.prepared():
                steps = self._steps(step, injection)
            seen = watch.seen(f"run {index + 1}: {size:g}, {plan}")
            runs.append({"size": size, "plan": plan, "disturbance": seen, "steps": steps})
        return {**asdict(case), "rate_bps": rate_bps, "sample_fields": SAMPLE_FIELDS, "runs": runs}

    def _ready_for(self, case: Case) -> tuple[Step, float]:
        """The model, warm, and the rate at which it waits for the case's share of a step."""
        if self._ready is None:
            self.warm_up()
            step = Step(case.shape, Variant(BASELINE, PLANS["k2"]), self.links[False], None)
            self._biases = {None: biases_of(step.module)}
            for plan in (PLANS["k2"], PLANS[BASELINE]):
                step.run_by(plan)
                step.run()
            self._ready = step, self.set_rate_for(case, step, step)
        step, rate_bps = self._ready
        self._set_rate(rate_bps)
        return step, rate_bps

    def _make_biases(self, case: Case) -> None:
        """The biases that send each share of rows to the first expert, on a fast link."""
        self.warm_up()
        for share in SIZES[Cause.ROWS][: self.job.sweeps]:
            shape = replace(case.shape, hot_share=share)
            self._biases[share] = biases_of(Step(shape, Variant("stock", None), self.links[False], None).module)
        assert self._ready is not None
        self._set_rate(self._ready[1])

    def _steps(self, step: Step, injection: Injection) -> dict[str, list[dict[str, Any]]]:
        """Steps without and with the cause in turns, each with its samples and what was found."""
        found: dict[str, list[dict[str, Any]]] = {"without": [], "with": []}
        for repeat in range(-_WARM_UP_STEPS, self.job.repeats):
            without = self._step(step)
            with injection.switched_on():
                beside = self._step(step)
            if repeat >= 0:
                found["without"].append(without)
                found["with"].append(beside)
        return found

    def _step(self, step: Step) -> dict[str, Any]:
        trace = Trace(CPU, dist.get_rank())
        own: list[TracedRank] = []
        sample, _ = step.run(around=lambda: _traced(step, trace, own))
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, own[0])
        samples = on_all_ranks(sample)
        causes = None
        if dist.get_rank() == 0:
            causes = to_plain(causes_of_group(everyone, link_kind(step.module.decoder.comm, CPU)))
        dist.barrier()
        return {"samples": samples, "causes": causes}


@contextmanager
def _traced(step: Step, trace: Trace, own: list[TracedRank]) -> Iterator[None]:
    comm = step.module.decoder.comm
    comm.record_to(trace)
    trace.begin_step()
    try:
        yield
        own.append(traced_rank(trace.end_step(), CPU))
    finally:
        comm.record_to(None)


BENCH = CausesBench
