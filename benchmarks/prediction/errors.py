"""From raw samples to errors: what was predicted against the medians of what was measured. Pure arithmetic."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.samples import all_exposed, by_rank, slower, spread
from benchmarks.prediction.cases import PLANNED
from megatron_lancet.schedule.dispatch import PLAIN, Dispatch

MAX_MEDIAN_ERROR = 0.04
MAX_ERROR = 0.10
"""Of the measured step time."""
MAX_SLOWER = 0.02
"""By which the planner's choice may be slower than the fastest measured configuration."""
MAX_EXPOSED_ERROR = 0.15
MAX_EXPOSED_MS = 10.0
"""Exposed time is to be within the former of the measured one, or within the latter."""
_step_ms = slower("step_ms")


@dataclass(frozen=True)
class Comparison:
    """One configuration.

    Attributes:
        is_paired: whether backwards are paired with forwards.
        measured_ms: step time of the slower rank, median over all repeats.
        low_ms: lower quartile of the same.
        high_ms: upper quartile.
        measured_exposed_ms: time blocked in waits, counts included: mean of the ranks, median over all repeats.
    """

    case: str
    name: str
    is_paired: bool
    is_tiled: bool
    measured_ms: float
    low_ms: float
    high_ms: float
    predicted_ms: float
    measured_exposed_ms: float
    predicted_exposed_ms: float

    @property
    def error(self) -> float:
        """Of the predicted step time, relative to the measured one; above 0 if too long was predicted."""
        return self.predicted_ms / self.measured_ms - 1

    @property
    def exposed_error_ms(self) -> float:
        """Of the predicted exposed time; above 0 if too much was predicted."""
        return self.predicted_exposed_ms - self.measured_exposed_ms

    @property
    def exposed_is_close(self) -> bool:
        """Whether the exposed time is as near as it is to be."""
        return abs(self.exposed_error_ms) <= max(MAX_EXPOSED_MS, MAX_EXPOSED_ERROR * self.measured_exposed_ms)


@dataclass(frozen=True)
class CaseErrors:
    """One case.

    Attributes:
        rate_bps: of the link, in bits per second; None where it was not shaped.
        measured_share: exposed share of ``k1``'s step; None where it was not run.
        is_disturbed: whether something else used the cores meanwhile.
        halves: the same with the first half of the repeats as a prediction of the second: what the machine's own
            unrest makes of a perfect prediction. Empty with a single repeat.
        fastest: name of the configuration with the shortest measured step.
        planned_over_fastest: measured step of the planner's choice over that one's; None where it was not run.
        planned_dispatch: what all-to-alls carry by the planner's choice, likewise.
    """

    name: str
    title: str
    rate_bps: float | None
    measured_share: float | None
    comparisons: tuple[Comparison, ...]
    is_disturbed: bool
    num_repeats: int
    halves: tuple[Comparison, ...]
    fastest: str
    planned_over_fastest: float | None
    planned_dispatch: Dispatch | None

    @property
    def paired(self) -> list[Comparison]:
        """The configurations in which backwards are paired with forwards."""
        return [one for one in self.comparisons if one.is_paired]

    @property
    def tiled(self) -> list[Comparison]:
        """The configurations in which rows go to other ranks in tiles."""
        return [one for one in self.comparisons if one.is_tiled]


@dataclass(frozen=True)
class Totals:
    """Over all configurations of all cases.

    Attributes:
        median: of the absolute relative errors of the step time.
        worst: the largest of them.
        worst_name: whose it is.
        num_exposed_close: configurations whose exposed time is as near as it is to be.
        number: configurations.
    """

    median: float
    worst: float
    worst_name: str
    num_exposed_close: int
    number: int


def compare(case: dict[str, Any]) -> CaseErrors:
    """
    Args:
        case: as the ranks wrote it.
    """
    names = list(case["predictions"])
    comparisons = tuple(_comparison(case, name) for name in names)
    by_name = {one.name: one for one in comparisons}
    k1, planned = by_name.get("k1"), by_name.get(PLANNED)
    fastest = min(comparisons, key=lambda one: one.measured_ms)
    return CaseErrors(
        name=case["name"],
        title=case["title"],
        rate_bps=case["rate_bps"],
        measured_share=None if k1 is None else k1.measured_exposed_ms / k1.measured_ms,
        comparisons=comparisons,
        is_disturbed=case["disturbance"]["is_disturbed"],
        num_repeats=len(case["samples"][comparisons[0].name]),
        halves=tuple(_between_halves(case, name) for name in names if len(case["samples"][name]) > 1),
        fastest=fastest.name,
        planned_over_fastest=None if planned is None else planned.measured_ms / fastest.measured_ms,
        # Plans of older files, and plain ones, name no dispatch.
        planned_dispatch=None
        if planned is None
        else Dispatch.known()[case["plans"][PLANNED].get("dispatch", PLAIN.name)],
    )


def totals(every: Sequence[Comparison]) -> Totals:
    """Over all of them."""
    worst = max(every, key=lambda one: abs(one.error))
    return Totals(
        median=statistics.median(abs(one.error) for one in every),
        worst=abs(worst.error),
        worst_name=f"{worst.case} {worst.name}",
        num_exposed_close=sum(one.exposed_is_close for one in every),
        number=len(every),
    )


def _comparison(case: dict[str, Any], name: str) -> Comparison:
    steps, exposed = _measured(case, name)
    expected = case["predictions"][name]["expected"]
    return _compared(case, name, steps, exposed, expected["step_ms"], expected["exposed_ms"])


def _between_halves(case: dict[str, Any], name: str) -> Comparison:
    steps, exposed = _measured(case, name)
    half = len(steps) // 2
    first_ms, first_exposed_ms = statistics.median(steps[:half]), statistics.median(exposed[:half])
    return _compared(case, name, steps[half:], exposed[half:], first_ms, first_exposed_ms)


def _measured(case: dict[str, Any], name: str) -> tuple[list[float], list[float]]:
    """Step time of the slower rank and exposed time, mean of the ranks, of each repeat."""
    repeats = by_rank(case["sample_fields"], case["samples"][name])
    return [_step_ms(ranks) for ranks in repeats], [all_exposed(ranks) for ranks in repeats]


def _compared(
    case: dict[str, Any],
    name: str,
    steps: Sequence[float],
    exposed: Sequence[float],
    predicted_ms: float,
    exposed_ms: float,
) -> Comparison:
    measured = spread(steps)
    return Comparison(
        case=case["name"],
        name=name,
        is_paired=case["plans"][name].get("pairing") is not None,
        is_tiled=any(segment.get("tiles") for segment in case["plans"][name]["segments"]),
        measured_ms=measured.median,
        low_ms=measured.low,
        high_ms=measured.high,
        predicted_ms=predicted_ms,
        measured_exposed_ms=statistics.median(exposed),
        predicted_exposed_ms=exposed_ms,
    )
