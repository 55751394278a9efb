"""Runs the variants of a case in turns: checked against stock first, then timed at the rate that the case wants."""

import gc
import resource
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from benchmarks.gradient_error import relative_errors, worst
from benchmarks.network.cases import VARIANTS, Case
from benchmarks.network.disturbance import cpu_times, disturbance
from benchmarks.network.job import Job
from benchmarks.network.links import Link, sent_bytes
from benchmarks.network.namespaces import run_command, shaping_command
from benchmarks.network.rate import RateSearch
from benchmarks.network.step import SAMPLE_FIELDS, Sample, Step, on_both_ranks

TOLERANCE = 2e-6
"""Of the norm of stock's gradient, and of stock's loss: fp32 sums in another order."""
_WARM_UP_BPS = 2e9
_RATE_CORRECTIONS = 3
_STEPS_PER_RATE = 3
_OTHER_TRAFFIC = 0.02
"""Of the payload, on the wire beside it: headers and counts."""


class WrongResultError(Exception):
    """A variant computed something else than stock, or used the wrong link."""


def say(text: str) -> None:
    """Print on rank 0."""
    if dist.get_rank() == 0:
        print(text, flush=True)


@dataclass(frozen=True)
class Ready:
    """Variants that are built, checked and warm.

    Attributes:
        errors: largest relative difference from stock, by variant.
        expert_shares: per layer, of the routed rows.
        peak_bytes: peak activation memory of each rank, by variant.
    """

    case: Case
    steps: dict[str, Step]
    errors: dict[str, float]
    expert_shares: list[list[float]]
    peak_bytes: dict[str, list[int]]

    def fits(self, case: Case) -> bool:
        """Whether ``case`` can use them: the rate of the link is no part of them."""
        return set(case.variants) <= set(self.steps) and (case.shape, case.optimizer, case.baseline) == (
            self.case.shape,
            self.case.optimizer,
            self.case.baseline,
        )


class Bench:
    """The links of this rank and what is measured over them."""

    def __init__(self, job: Job, shaped: str, free: str, timeout: timedelta) -> None:
        """Collective."""
        self._job = job
        self._shaped_name = shaped
        ep_group = parallel_state.get_expert_model_parallel_group()
        self._set_rate(_WARM_UP_BPS)
        self._links = {False: Link(shaped, ep_group, timeout), True: Link(free, ep_group, timeout)}
        self._ready: Ready | None = None

    def measure(self, case: Case) -> dict[str, Any]:
        """Everything about a case, for the JSON file."""
        say(f"case {case.name}: {case.title}")
        started_s = time.monotonic()
        ready = self._ready_for(case)
        steps = {name: ready.steps[name] for name in case.variants}
        rate_bps = self._job.rate_bps if self._job.rate_bps is not None else self._find_rate(case, steps)
        self._set_rate(rate_bps)
        say(f"  {rate_bps / 1e6:.0f} Mbit/s; prepared in {time.monotonic() - started_s:.0f} s")
        sweeps = [self._sweep(index, steps) for index in range(self._job.sweeps)]
        return {
            **asdict(case),
            "rate_bps": rate_bps,
            "expert_shares": ready.expert_shares,
            "plans": {name: str(VARIANTS[name].plan or "stock") for name in steps},
            "largest_errors": {name: ready.errors[name] for name in steps},
            "peak_activation_bytes": {name: ready.peak_bytes[name] for name in steps},
            "sample_fields": SAMPLE_FIELDS,
            "sweeps": sweeps,
        }

    def _ready_for(self, case: Case) -> "Ready":
        """The case's variants, built, checked and warm: those of the last case if they will do."""
        last = self._ready
        if last is not None and last.fits(case):
            return last
        self._ready = last = None
        gc.collect()  # models and their DDP hooks refer to each other
        self._set_rate(_WARM_UP_BPS)
        steps, errors = self._prepared(case)
        baseline = steps[case.baseline]
        baseline.take_expert_shares()
        baseline.run()
        shares = baseline.take_expert_shares()
        peaks = {name: self._peak_bytes(step) for name, step in steps.items()}
        gc.collect()
        self._ready = Ready(case, steps, errors, shares, peaks)
        return self._ready

    def _set_rate(self, rate_bps: float) -> None:
        """Cap what this rank sends; the other one does the same."""
        set_rate(self._shaped_name, rate_bps)

    def _prepared(self, case: Case) -> tuple[dict[str, Step], dict[str, float]]:
        """The variants, warm, and how far each is from stock."""
        steps: dict[str, Step] = {}
        weights: dict[str, torch.Tensor] | None = None
        expected: dict[str, torch.Tensor] = {}
        errors = {}
        for name in case.variants:
            variant = VARIANTS[name]
            step = Step(case.shape, variant, self._links[variant.free_link], weights, case.optimizer)
            if weights is None:
                assert variant.plan is None, "stock comes first: the others are compared with it"
                weights = {key: value.clone() for key, value in step.module.state_dict().items() if value is not None}
            loss = self._first_step(step)
            results = {"loss": loss, **step.gradients()}
            if not expected:
                expected = {key: value.clone() for key, value in results.items()}
            errors[name] = self._checked(name, results, expected)
            steps[name] = step
        return steps, errors

    def _first_step(self, step: Step) -> torch.Tensor:
        """Run it once, and see that its messages took its link and no other."""
        before = sent_bytes(self._shaped_name)
        sample, loss = step.run()
        dist.barrier()
        on_wire = sent_bytes(self._shaped_name) - before
        payload = 0.0 if step.variant.free_link else sample.payload_bytes
        slack = _OTHER_TRAFFIC * sample.payload_bytes + 20_000
        reduced = on_wire - payload if sample.reduce_ms > 0 else 0.0
        if not payload <= on_wire - reduced <= payload + slack:
            raise WrongResultError(
                f"{step.variant.name} sent {sample.payload_bytes:.0f} bytes, of which {payload:.0f} belong on the "
                f"shaped link, but {on_wire} bytes went over it"
            )
        return loss

    @staticmethod
    def _checked(name: str, results: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
        """Largest relative error on any rank."""
        parameter, error = worst(relative_errors(results, expected))
        everywhere = torch.tensor(error, dtype=torch.float64)
        dist.all_reduce(everywhere, op=dist.ReduceOp.MAX)
        if not everywhere.item() <= TOLERANCE:
            raise WrongResultError(
                f"{name} differs from stock by {everywhere.item():.1e} of the norm, more than {TOLERANCE:.0e}; "
                f"on this rank most in {parameter}: {error:.1e}"
            )
        return everywhere.item()

    @staticmethod
    def _peak_bytes(step: Step) -> list[int]:
        peaks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(peaks, step.peak_activation_bytes())
        return peaks

    def _find_rate(self, case: Case, steps: Mapping[str, Step]) -> float:
        """The rate at which the baseline waits for the wanted share of its forward and backward pass."""
        baseline = steps[case.baseline]
        free = steps[VARIANTS[case.baseline].compute]
        free.run()
        return find_rate(case.exposed_share, exposure(free), baseline, self._set_rate)

    def _sweep(self, index: int, steps: Mapping[str, Step]) -> dict[str, Any]:
        """All variants in turns, in an order that rotates from repeat to repeat."""
        names = list(steps)
        samples: dict[str, list[list[list[float]]]] = {name: [] for name in names}
        watch = CpuWatch(self._job.cores)
        for repeat in range(self._job.repeats):
            turn = repeat % len(names)
            for name in names[turn:] + names[:turn]:
                samples[name].append(on_both_ranks(steps[name].run()[0]))
        return {"disturbance": watch.seen(f"sweep {index + 1} of {self._job.sweeps}"), "samples": samples}


def set_rate(interface: str, rate_bps: float) -> None:
    """Cap what this rank sends; the other one does the same. Collective."""
    dist.barrier()
    run_command(shaping_command(interface, rate_bps))
    dist.barrier()


def find_rate(
    share: float, free: tuple[float, float, float], baseline: Step, set_rate: Callable[[float], None]
) -> float:
    """The rate at which ``baseline`` waits for ``share`` of its forward and backward pass. Collective.

    Args:
        free: :func:`exposure` on a free link.
    """
    exposed_ms, passes_ms, payload_bytes = free
    search = RateSearch(share, passes_ms - exposed_ms, exposed_ms, payload_bytes)
    for _ in range(_RATE_CORRECTIONS):
        set_rate(search.rate_bps)
        baseline.run()
        exposed_ms, passes_ms, _ = exposure(baseline)
        say(f"  at {search.rate_bps / 1e6:.0f} Mbit/s {baseline.variant.name} exposes {exposed_ms / passes_ms:.1%}")
        if not search.correct(exposed_ms, passes_ms):
            break
    return search.rate_bps


def exposure(step: Step) -> tuple[float, float, float]:
    """Medians over some steps: exposed time (mean of the ranks), both passes (slower rank), bytes (larger)."""
    exposed, passes, sent = [], [], []
    for _ in range(_STEPS_PER_RATE):
        ranks = [Sample(*values) for values in on_both_ranks(step.run()[0])]
        exposed.append(statistics.mean(rank.exposed_ms for rank in ranks))
        passes.append(max(rank.forward_ms + rank.backward_ms for rank in ranks))
        sent.append(max(rank.payload_bytes for rank in ranks))
    return statistics.median(exposed), statistics.median(passes), statistics.median(sent)


class CpuWatch:
    """From now on watches what else runs on the cores. Collective."""

    def __init__(self, cores: list[int]) -> None:
        self._cores = cores
        self._own_s = _own_cpu_s()
        self._before, self._start_s = cpu_times(cores), time.monotonic()

    def seen(self, what: str) -> dict[str, Any]:
        """What was seen since then, said on rank 0 and for the JSON file. Collective.

        Args:
            what: that was measured meanwhile.
        """
        elapsed_s, after = time.monotonic() - self._start_s, cpu_times(self._cores)
        found = disturbance(self._before, after, _own_cpu_s() - self._own_s, elapsed_s, len(self._cores))
        say(f"  {what}: {elapsed_s:.0f} s; {'DISTURBED: ' if found.is_disturbed else ''}{found}")
        return {**asdict(found), "is_disturbed": found.is_disturbed}


def _own_cpu_s() -> float:
    """CPU time that all ranks used so far. Collective."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    total = torch.tensor(usage.ru_utime + usage.ru_stime, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item()
