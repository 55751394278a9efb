"""Runs the variants of a case in turns: checked against stock first, then timed at the rate that the case wants."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness.bench import COUNTED_FIELDS, TOLERANCE, Bench, largest_error, say
from benchmarks.harness.cases import Case
from benchmarks.network.cases import VARIANTS
from benchmarks.training_step.placed import placements_for
from benchmarks.training_step.routing import SentRows
from benchmarks.training_step.step import Step


@dataclass(frozen=True)
class _Ready:
    """Variants that are built, checked and warm.

    Attributes:
        errors: largest relative difference from stock, by variant.
        expert_shares: per layer, of the routed rows.
        placements: the expert of each place, by layer, in variants that place experts; empty without any.
        sent_rows: what the routing sends to other nodes in a step.
        peak_bytes: peak activation memory of each rank, by variant.
    """

    case: Case
    steps: dict[str, Step]
    errors: dict[str, float]
    expert_shares: list[list[float]]
    placements: list[Sequence[int]]
    sent_rows: SentRows
    peak_bytes: dict[str, list[int]]

    def fits(self, case: Case) -> bool:
        """Whether ``case`` can use them: the rate of the link is no part of them."""
        return set(case.variants) <= set(self.steps) and (case.shape, case.optimizer, case.baseline) == (
            self.case.shape,
            self.case.optimizer,
            self.case.baseline,
        )


class NetworkBench(Bench):
    """Compares every variant with stock, then lets them take turns."""

    _ready: _Ready | None = None

    def measure(self, case: Case) -> dict[str, Any]:
        """Everything about a case, for the JSON file."""
        say(f"case {case.name}: {case.title}")
        started_s = time.monotonic()
        ready = self._ready_for(case)
        steps = {name: ready.steps[name] for name in case.variants}
        rate_bps = self.set_rate_for(case, steps[case.baseline], steps[VARIANTS[case.baseline].compute])
        say(f"  {rate_bps / 1e6:.0f} Mbit/s; prepared in {time.monotonic() - started_s:.0f} s")
        return {
            **asdict(case),
            "rate_bps": rate_bps,
            "expert_shares": ready.expert_shares,
            "sent_rows": asdict(ready.sent_rows),
            "plans": {name: VARIANTS[name].schedule for name in steps},
            "largest_errors": {name: ready.errors[name] for name in steps},
            "placements": ready.placements,
            "peak_activation_bytes": {name: ready.peak_bytes[name] for name in steps},
            "sample_fields": COUNTED_FIELDS,
            "sweeps": [self.sweep(index, steps) for index in range(self.job.sweeps)],
        }

    def _ready_for(self, case: Case) -> _Ready:
        """The case's variants, built, checked and warm: reused from the last case if possible."""
        last = self._ready
        if last is not None and last.fits(case):
            return last
        self._ready = last = None
        self.warm_up()
        steps, errors, placements = self._prepared(case)
        baseline = steps[case.baseline]
        baseline.take_expert_shares()
        sent_rows = baseline.count_sent_rows()
        shares = baseline.take_expert_shares()
        peaks = {name: _peak_bytes(step) for name, step in steps.items()}
        self.warm_up()
        self._ready = _Ready(case, steps, errors, shares, placements, sent_rows, peaks)
        return self._ready

    def _prepared(self, case: Case) -> tuple[dict[str, Step], dict[str, float], list[Sequence[int]]]:
        """The variants, warm, how far each is from stock, and where some of them have their experts."""
        steps: dict[str, Step] = {}
        weights: dict[str, torch.Tensor] | None = None
        expected: dict[str, torch.Tensor] = {}
        errors: dict[str, float] = {}
        placements: list[Sequence[int]] = []
        for name in case.variants:
            variant = VARIANTS[name]
            if variant.is_placed and not placements:
                placements = placements_for(steps[case.baseline].take_expert_shares(), case.num_ranks)
            where = placements if variant.is_placed else ()
            step = Step(case.shape, variant, self.links[variant.free_link], weights, case.optimizer, where)
            if weights is None:
                assert variant.plan is None, "stock comes first: the others are compared with it"
                weights = {key: value.clone() for key, value in step.module.state_dict().items() if value is not None}
            _, loss = self.counted(step)
            results = {"loss": loss, **step.gradients()}
            if not expected:
                expected = {key: value.clone() for key, value in results.items()}
            tolerance = 0.0 if variant.is_exact(case.shape.topk) else TOLERANCE
            errors[name] = largest_error(name, results, expected, case.variants[0], tolerance)
            steps[name] = step
        return steps, errors, placements


BENCH = NetworkBench


def _peak_bytes(step: Step) -> list[int]:
    peaks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(peaks, step.peak_activation_bytes())
    return peaks
