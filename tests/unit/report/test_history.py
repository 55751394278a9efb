"""The history of steps has a bounded number of points, and loses no step."""

import pytest

from megatron_lancet.report import history
from megatron_lancet.report.history import StepHistory, StepPoint


def test_history_of_a_short_run_has_each_step():
    found = StepHistory()
    for step in (1, 2, 3):
        found.add(step, 100.0 * step, 10.0 * step)
    assert found.complete() == [StepPoint(step, 1, 100.0 * step, 10.0 * step) for step in (1, 2, 3)]


@pytest.mark.parametrize("num_steps", [8, 9, 100, 1001])
def test_history_of_a_long_run_has_few_points_of_equal_parts(monkeypatch, num_steps):
    monkeypatch.setattr(history, "MAX_POINTS", 7)
    found = StepHistory()
    for step in range(1, num_steps + 1):
        found.add(step, float(step), 0.0)
    points = found.complete()
    assert len(points) <= 8
    assert sum(point.num_steps for point in points) == num_steps
    assert sum(point.step_ms * point.num_steps for point in points) == pytest.approx(num_steps * (num_steps + 1) / 2)
    first = 1
    for point in points:
        assert point.iteration == first
        first += point.num_steps
    assert len({point.num_steps for point in points[:-1]}) == 1
