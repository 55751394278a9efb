"""Runs the variants of a case in turns: gradients checked against Megatron's first, bytes on the wire in each step."""

import gc
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from benchmarks.gradient_error import relative_errors, worst
from benchmarks.network.cases import Case
from benchmarks.network.job import Job
from benchmarks.network.links import Link, sent_bytes
from benchmarks.network.measure import (
    TOLERANCE,
    CpuWatch,
    WrongResultError,
    exposure,
    find_rate,
    say,
    set_rate,
)
from benchmarks.network.step import SAMPLE_FIELDS, Step, on_both_ranks
from benchmarks.priority.cases import BASELINE, FREE, VARIANTS

_WARM_UP_BPS = 2e9
_WARM_UP_STEPS = 2
"""In DDP's first one reductions start at its end."""
_OTHER_TRAFFIC = 0.02
"""Of all bytes, on the wire beside them: headers, counts, and norms for clipping."""


class PriorityBench:
    """The links of this rank and what is measured over them."""

    def __init__(self, job: Job, shaped: str, free: str, timeout: timedelta) -> None:
        """Collective."""
        self._job = job
        self._shaped_name = shaped
        self._set_rate(_WARM_UP_BPS)
        ep_group = parallel_state.get_expert_model_parallel_group()
        self._links = {False: Link(shaped, ep_group, timeout), True: Link(free, ep_group, timeout)}
        self._steps: dict[str, Step] = {}
        self._built_for: Case | None = None
        self._errors: dict[str, float] = {}

    def measure(self, case: Case) -> dict[str, Any]:
        """Everything about a case, for the JSON file."""
        say(f"case {case.name}: {case.title}")
        self._build(case)
        rate_bps = self._job.rate_bps
        if rate_bps is None:
            rate_bps = find_rate(case.exposed_share, exposure(self._steps[FREE]), self._steps[BASELINE], self._set_rate)
        self._set_rate(rate_bps)
        say(f"  {rate_bps / 1e6:.0f} Mbit/s")
        return {
            **asdict(case),
            "rate_bps": rate_bps,
            "plans": {name: str(VARIANTS[name].plan or "stock") for name in case.variants},
            "largest_errors": self._errors,
            "sample_fields": [*SAMPLE_FIELDS, "wire_bytes"],
            "sweeps": [self._sweep(index, case) for index in range(self._job.sweeps)],
        }

    def _set_rate(self, rate_bps: float) -> None:
        set_rate(self._shaped_name, rate_bps)

    def _build(self, case: Case) -> None:
        """The variants, warm and checked; those of the last case where only the rate differs."""
        if self._built_for is not None and self._built_for.shape == case.shape:
            return
        self._steps = {}
        gc.collect()  # models and their DDP hooks refer to each other
        self._set_rate(_WARM_UP_BPS)
        weights: dict[str, torch.Tensor] | None = None
        expected: dict[str, torch.Tensor] = {}
        for name in case.variants:
            variant = VARIANTS[name]
            step = Step(case.shape, variant, self._links[variant.free_link], weights, has_optimizer=True)
            if weights is None:
                weights = {key: value.clone() for key, value in step.module.state_dict().items() if value is not None}
            for _ in range(_WARM_UP_STEPS):
                sample = self._counted(step)
            self._check_bytes(step, sample)
            found = step.gradients()
            expected = expected or {key: value.clone() for key, value in found.items()}
            self._errors[name] = self._checked(name, found, expected)
            self._steps[name] = step
        self._built_for = case

    def _counted(self, step: Step) -> list[list[float]]:
        """One step's samples of all ranks, each with the bytes that left its shaped interface. Collective."""
        before = sent_bytes(self._shaped_name)
        sample, _ = step.run()
        dist.barrier()  # what is still in the link's queue has left
        on_wire = torch.tensor([sent_bytes(self._shaped_name) - before], dtype=torch.float64)
        everyone = [torch.empty_like(on_wire) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, on_wire)
        return [[*values, wire.item()] for values, wire in zip(on_both_ranks(sample), everyone, strict=True)]

    def _check_bytes(self, step: Step, ranks: list[list[float]]) -> None:
        """All variants send the same: their rows, where they use the link, and what a reduction has to send."""
        for values in ranks:
            sample = dict(zip([*SAMPLE_FIELDS, "wire_bytes"], values, strict=True))
            payload = 0.0 if step.variant.free_link else sample["payload_bytes"]
            due = payload + sample["reduced_bytes"]
            if not due <= sample["wire_bytes"] <= due * (1 + _OTHER_TRAFFIC) + 50_000:
                raise WrongResultError(
                    f"{step.variant.name} should send {payload:.0f} bytes of rows and {sample['reduced_bytes']:.0f} of "
                    f"gradients over the shaped link, but {sample['wire_bytes']:.0f} bytes went over it"
                )

    @staticmethod
    def _checked(name: str, found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
        """Largest relative error of a reduced gradient on any rank."""
        parameter, error = worst(relative_errors(found, expected))
        everywhere = torch.tensor(error, dtype=torch.float64)
        dist.all_reduce(everywhere, op=dist.ReduceOp.MAX)
        if not everywhere.item() <= TOLERANCE:
            raise WrongResultError(
                f"gradients of {name} differ from {BASELINE}'s by {everywhere.item():.1e} of the norm; "
                f"on this rank most in {parameter}: {error:.1e}"
            )
        return everywhere.item()

    def _sweep(self, index: int, case: Case) -> dict[str, Any]:
        """All variants in turns, in an order that rotates from repeat to repeat."""
        names = case.variants
        samples: dict[str, list[list[list[float]]]] = {name: [] for name in names}
        watch = CpuWatch(self._job.cores)
        for repeat in range(self._job.repeats):
            turn = repeat % len(names)
            for name in names[turn:] + names[:turn]:
                samples[name].append(self._counted(self._steps[name]))
        return {"disturbance": watch.seen(f"sweep {index + 1} of {self._job.sweeps}"), "samples": samples}
