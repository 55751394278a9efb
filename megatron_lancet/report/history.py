"""Keeps the times of a run's steps in bounded memory, for plots over the run."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import batched

MAX_POINTS = 2_000
"""A run may have millions of steps; a plot has no more pixels."""


@dataclass(frozen=True)
class StepPoint:
    """Means over neighbouring steps.

    Attributes:
        iteration: number of the first.
        num_steps: number of them.
        exposed_ms: part of a step for which compute waited for messages, token counts included.
    """

    iteration: int
    num_steps: int
    step_ms: float
    exposed_ms: float


@dataclass
class StepHistory:
    """The steps of a run on one rank, a point each; of longer runs a point for 2, 4, 8, ... neighbours."""

    points: list[StepPoint] = field(default_factory=list)
    _num_in_point: int = 1
    _open: list[StepPoint] = field(default_factory=list)

    def add(self, iteration: int, step_ms: float, exposed_ms: float) -> None:
        """Adds a step."""
        self._open.append(StepPoint(iteration, 1, step_ms, exposed_ms))
        if len(self._open) < self._num_in_point:
            return
        self.points.append(_mean(self._open))
        self._open = []
        if len(self.points) > MAX_POINTS:
            self.points = [_mean(pair) for pair in batched(self.points, 2)]
            self._num_in_point *= 2

    def complete(self) -> list[StepPoint]:
        """All points, with the steps that do not fill one."""
        return [*self.points, _mean(self._open)] if self._open else self.points


def _mean(points: Sequence[StepPoint]) -> StepPoint:
    """One point for several neighbours, each of as many steps."""
    return StepPoint(
        points[0].iteration,
        sum(point.num_steps for point in points),
        statistics.fmean(point.step_ms for point in points),
        statistics.fmean(point.exposed_ms for point in points),
    )
