"""How far gradients are from stock Megatron's: the one definition that all tests and benchmarks share.

Every error is a non-negative float, never NaN: what cannot be compared is infinitely far away. So ``max`` and ``<=``
see it, whatever else is compared next to it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_SMALLEST_NORM = 1e-12
_SMALLEST_LOSS = 1e-9


def relative_error(ours: torch.Tensor, stock: torch.Tensor) -> float:
    """Norm of the difference over the norm of stock's; 0 only for equal bits, infinite where one is not finite."""
    if not (ours.isfinite().all() and stock.isfinite().all()):
        return math.inf
    if ours.equal(stock):
        return 0.0
    return _or_infinite(((ours - stock).norm() / stock.norm().clamp_min(_SMALLEST_NORM)).item())


def relative_errors(ours: Mapping[str, torch.Tensor], stock: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """:func:`relative_error` by parameter; infinite for a parameter that only one side has."""
    return {
        name: relative_error(ours[name], stock[name]) if name in ours and name in stock else math.inf
        for name in [*ours, *(name for name in stock if name not in ours)]
    }


def relative_difference(ours: Iterable[float], stock: Iterable[float]) -> float:
    """Largest difference of two equally long series of losses, each relative to stock's; 0 for no losses."""
    pairs = zip(ours, stock, strict=True)
    return max((_or_infinite(abs(a - b) / max(abs(b), _SMALLEST_LOSS)) for a, b in pairs), default=0.0)


def worst(errors: Mapping[str, float]) -> tuple[str, float]:
    """The parameter with the largest error, and the error; infinite for one that is NaN.

    Raises:
        ValueError: nothing was compared.
    """
    return max(((name, _or_infinite(error)) for name, error in errors.items()), key=lambda entry: entry[1])


def _or_infinite(error: float) -> float:
    return error if math.isfinite(error) else math.inf
