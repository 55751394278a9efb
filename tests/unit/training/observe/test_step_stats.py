"""Figures of a few steps, and when two of them differ."""

import pytest

from megatron_lancet.training.observe.step_stats import (
    StepStats,
    StepTimes,
    exposed_noise_ms,
    stats_of_rank,
    step_noise_ms,
)


def stats(step_ms: float, spread_ms: float = 0, exposed_ms: float = 0, num_steps: int = 10) -> StepStats:
    return StepStats(step_ms, spread_ms, exposed_ms, spread_ms, 0, num_steps)


def test_step_stats_ignore_one_slow_step():
    steps = [StepTimes(100 + i, 10, 50) for i in range(5)]
    calm, disturbed = stats_of_rank(steps), stats_of_rank([*steps[:4], StepTimes(5000, 10, 50)])
    assert calm.step_ms == disturbed.step_ms == 102
    assert calm.spread_ms == disturbed.spread_ms == pytest.approx(1.4826)
    assert (calm.exposed_ms, calm.exposed_spread_ms, calm.in_flight_ms, calm.num_steps) == (10, 0, 50, 5)


def test_step_noise_grows_with_spread_and_falls_with_steps():
    assert step_noise_ms(stats(200), stats(190)) == pytest.approx(2), "one percent at least"
    few, many = stats(100, 20, num_steps=4), stats(100, 20, num_steps=16)
    assert step_noise_ms(few, few) == pytest.approx(2 * step_noise_ms(many, many))
    assert step_noise_ms(few, few) == pytest.approx(2 * 1.2533 * (20 / 2) * 2**0.5)
    assert exposed_noise_ms(few, few) == step_noise_ms(few, few)
