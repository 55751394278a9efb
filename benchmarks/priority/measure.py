"""Runs the variants of a case in turns: gradients checked against Megatron's first, bytes on the wire in each step."""

from dataclasses import asdict
from typing import Any

import torch

from benchmarks.harness.bench import COUNTED_FIELDS, Bench, largest_error, say
from benchmarks.harness.cases import Case
from benchmarks.priority.cases import BASELINE, FREE, VARIANTS
from benchmarks.training_step.step import Step

_WARM_UP_STEPS = 2
"""In DDP's first one reductions start at its end."""


class PriorityBench(Bench):
    """Compares every variant's reduced gradients with Megatron's, then lets the variants take turns."""

    _ready: tuple[Case, dict[str, Step], dict[str, float]] | None = None

    def measure(self, case: Case) -> dict[str, Any]:
        """Everything about a case, for the JSON file."""
        say(f"case {case.name}: {case.title}")
        steps, errors = self._ready_for(case)
        rate_bps = self.set_rate_for(case, steps[BASELINE], steps[FREE])
        say(f"  {rate_bps / 1e6:.0f} Mbit/s")
        return {
            **asdict(case),
            "rate_bps": rate_bps,
            "plans": {name: str(VARIANTS[name].plan or "stock") for name in case.variants},
            "largest_errors": errors,
            "sample_fields": COUNTED_FIELDS,
            "sweeps": [self.sweep(index, steps) for index in range(self.job.sweeps)],
        }

    def _ready_for(self, case: Case) -> tuple[dict[str, Step], dict[str, float]]:
        """The variants, warm and checked, and how far each is from Megatron.

        They are reused from the last case where only the rate of the link differs.
        """
        if self._ready is None or self._ready[0].shape != case.shape:
            self._ready = None
            self.warm_up()
            self._ready = case, *self._prepared(case)
        return self._ready[1:]

    def _prepared(self, case: Case) -> tuple[dict[str, Step], dict[str, float]]:
        steps: dict[str, Step] = {}
        errors = {}
        weights: dict[str, torch.Tensor] | None = None
        expected: dict[str, torch.Tensor] = {}
        for name in case.variants:
            variant = VARIANTS[name]
            step = Step(case.shape, variant, self.links[variant.free_link], weights, has_optimizer=True)
            if weights is None:
                weights = {key: value.clone() for key, value in step.module.state_dict().items() if value is not None}
            for _ in range(_WARM_UP_STEPS):
                self.counted(step)
            found = step.gradients()
            expected = expected or {key: value.clone() for key, value in found.items()}
            errors[name] = largest_error(name, found, expected, BASELINE)
            steps[name] = step
        return steps, errors


BENCH = PriorityBench
