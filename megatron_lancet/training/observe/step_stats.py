"""Medians of a few measured steps over all ranks, and how far two of them must differ to count as different."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

NUM_WARM_UP_STEPS = 3
"""A run's first steps allocate memory, connect the ranks and fill caches."""
MIN_NOISE_SHARE = 0.01
"""Two medians closer than this share of a step count as equal however calm the steps were: clocks, caches and other
jobs move whole runs by about as much."""
_NOISE_SIGMAS = 2.0
"""Standard errors that two medians must differ by: equal plans differ by mistake about once in twenty times."""
_SIGMA_PER_MAD = 1.4826
"""From the median absolute deviation to a normal distribution's standard deviation; one outlier does not move it."""
_MEDIAN_ERROR = 1.2533
"""The standard error of a median over the standard error of a mean (square root of pi / 2)."""


@dataclass(frozen=True)
class StepTimes:
    """One step on one rank.

    Attributes:
        step_ms: wall clock.
        exposed_ms: part of the step for which compute waited for all-to-alls, token counts included.
        in_flight_ms: sum over payload all-to-alls of the time from launch to completion.
    """

    step_ms: float
    exposed_ms: float
    in_flight_ms: float


@dataclass(frozen=True)
class StepStats:
    """Medians over the measured steps of one plan, on one rank or over all ranks.

    Attributes:
        step_ms: the slowest rank's step time.
        spread_ms: standard deviation of a single step, robust against outliers; the largest of all ranks.
        exposed_ms: mean over ranks.
        exposed_spread_ms: standard deviation of ``exposed_ms`` in a single step, as ``spread_ms``.
        in_flight_ms: mean over ranks.
        num_steps: number of measured steps.
    """

    step_ms: float
    spread_ms: float
    exposed_ms: float
    exposed_spread_ms: float
    in_flight_ms: float
    num_steps: float

    def __str__(self) -> str:
        return f"{self.step_ms:.1f} ms a step, {self.exposed_ms:.1f} ms of it exposed"


def stats_of_rank(steps: Sequence[StepTimes]) -> StepStats:
    """Medians of one rank over at least one step."""
    step_ms, step_spread_ms = _median_and_spread([step.step_ms for step in steps])
    exposed_ms, exposed_spread_ms = _median_and_spread([step.exposed_ms for step in steps])
    in_flight_ms = statistics.median(step.in_flight_ms for step in steps)
    return StepStats(step_ms, step_spread_ms, exposed_ms, exposed_spread_ms, in_flight_ms, len(steps))


def steps_of_run(ranks: Sequence[Sequence[StepTimes]]) -> list[StepTimes]:
    """Combines the same steps on every rank: the slowest rank's step time, and means of the other times."""
    return [
        StepTimes(
            max(one.step_ms for one in same),
            statistics.fmean(one.exposed_ms for one in same),
            statistics.fmean(one.in_flight_ms for one in same),
        )
        for same in zip(*ranks, strict=True)
    ]


def step_noise_ms(one: StepStats, other: StepStats) -> float:
    """The difference that two measured step times must exceed to count as different."""
    return _noise_ms(one.spread_ms, one.num_steps, other.spread_ms, other.num_steps, one.step_ms)


def exposed_noise_ms(one: StepStats, other: StepStats) -> float:
    """The difference that two measured exposed times must exceed to count as different."""
    return _noise_ms(one.exposed_spread_ms, one.num_steps, other.exposed_spread_ms, other.num_steps, one.step_ms)


def _noise_ms(spread_ms: float, num: float, other_spread_ms: float, other_num: float, step_ms: float) -> float:
    error_ms = _MEDIAN_ERROR * math.hypot(spread_ms / math.sqrt(num), other_spread_ms / math.sqrt(other_num))
    return max(MIN_NOISE_SHARE * step_ms, _NOISE_SIGMAS * error_ms)


def _median_and_spread(values: Sequence[float]) -> tuple[float, float]:
    median = statistics.median(values)
    return median, _SIGMA_PER_MAD * statistics.median(abs(value - median) for value in values)
