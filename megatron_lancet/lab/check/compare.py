"""Compares a run's loss, gradients and gradient norm with another run's."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

TOLERANCE = 1e-4
"""Largest error that is taken for rounding: 20 times the largest of 25 random launches (docs/check.md), in fp32."""
LOSS_TOLERANCE = 1e-5
_SMALL = 1e-3
"""Part of the norm of all gradients below which that norm is the measure: so a gradient of zero has an error."""


@dataclass(frozen=True)
class Outcome:
    """Results of one training step of a run.

    Attributes:
        gradients: whole gradients by their names in a checkpoint, with the number of the layer where a tensor has all.
        disagreement: largest difference between ranks that hold the same part of a gradient, relative as errors are.
        overlaps: whether modules of the overlap ran.
    """

    losses: dict[str, float]
    grad_norm: float
    gradients: dict[str, torch.Tensor]
    disagreement: dict[str, float]
    overlaps: bool


@dataclass(frozen=True)
class Comparison:
    """Relative differences of two runs.

    Attributes:
        parameters: largest first.
    """

    loss: float
    grad_norm: float
    parameters: dict[str, float] = field(default_factory=dict)
    disagreement: dict[str, float] = field(default_factory=dict)

    @property
    def wrong(self) -> list[str]:
        """Values that differ by more than rounding: ``loss``, ``grad norm``, and names of parameters."""
        found = ["loss"] if not self.loss <= LOSS_TOLERANCE else []
        found += ["grad norm"] if not self.grad_norm <= TOLERANCE else []
        found += [name for name, error in self.parameters.items() if not error <= TOLERANCE]
        apart = [name for name, error in self.disagreement.items() if not error <= TOLERANCE]
        return found + [f"{name} (ranks disagree)" for name in apart]

    @property
    def differs(self) -> bool:
        """Whether anything does."""
        return bool(self.wrong)


def outcome_of(folder: Path, num_ranks: int) -> Outcome:
    """Reads what the ranks of a run wrote, and puts their gradients together."""
    results = [json.loads((folder / f"result.{rank}.json").read_text()) for rank in range(num_ranks)]
    full: dict[str, torch.Tensor] = {}
    filled: dict[str, torch.Tensor] = {}
    apart: dict[str, float] = {}
    units: dict[str, bool] = {}
    for rank in range(num_ranks):
        for key, shape, bounds, values in torch.load(folder / f"shards.{rank}", weights_only=True):
            tensor = full.setdefault(key, torch.zeros(shape, dtype=torch.float64))
            known = filled.setdefault(key, torch.zeros(shape, dtype=torch.bool))
            where = tuple(slice(start, stop) for start, stop in bounds)
            part = values.double().reshape(tensor[where].shape)
            if known[where].all() and part.numel():
                apart[key] = max(apart.get(key, 0.0), (tensor[where] - part).norm().item())
            tensor[where], known[where] = part, True
            units[key] = units.get(key, True) and bounds[0][1] - bounds[0][0] == 1 and values.dim() < len(shape)
    missing = [key for key, known in filled.items() if not known.all()]
    assert not missing, f"no rank has all of {', '.join(missing)}"
    scale = _SMALL * _norm(full)
    gradients: dict[str, torch.Tensor] = {}
    for key, tensor in full.items():
        if units[key] and len(tensor) > 1:
            gradients |= {f"{key}[{index}]": part for index, part in enumerate(tensor)}
        else:
            gradients[key] = tensor
    disagreement = {key: gap / max(full[key].norm().item(), scale, 1e-30) for key, gap in apart.items()}
    losses = next(result["losses"] for result in reversed(results) if result["losses"])
    return Outcome(losses, results[0]["grad_norm"], gradients, disagreement, any(one["overlaps"] for one in results))


def compare(found: Outcome, expected: Outcome) -> Comparison:
    """How far ``found`` is from ``expected``."""
    scale = _SMALL * _norm(expected.gradients)
    errors = {
        name: _error(found.gradients.get(name), expected.gradients.get(name), scale)
        for name in dict.fromkeys([*expected.gradients, *found.gradients])
    }
    loss = max(_relative(found.losses.get(name, math.nan), value) for name, value in expected.losses.items())
    ordered = dict(sorted(errors.items(), key=lambda entry: -entry[1]))
    return Comparison(loss, _relative(found.grad_norm, expected.grad_norm), ordered, found.disagreement)


def _norm(gradients: Mapping[str, torch.Tensor]) -> float:
    return math.sqrt(sum(float(gradient.norm()) ** 2 for gradient in gradients.values()))


def _error(found: torch.Tensor | None, expected: torch.Tensor | None, scale: float) -> float:
    """Norm of the difference over the norm of what is expected; infinite where one is not finite, or not there."""
    if found is None or expected is None or found.shape != expected.shape:
        return math.inf
    if not (found.isfinite().all() and expected.isfinite().all()):
        return math.inf
    return (found - expected).norm().item() / max(expected.norm().item(), scale, 1e-30)


def _relative(found: float, expected: float) -> float:
    error = abs(found - expected) / max(abs(expected), 1e-30)
    return error if math.isfinite(error) else math.inf
