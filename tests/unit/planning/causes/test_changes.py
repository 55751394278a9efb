"""Lasting changes of a cause's share are told once, soon and with the right step; noise is not."""

import random

import pytest

from megatron_lancet.lab.causes.attribution import CausePart, StepCauses
from megatron_lancet.lab.causes.changes import NUM_CHANGED, NUM_REFERENCE, Changes
from megatron_lancet.lab.causes.replay import Cause


def window(shares: dict[Cause, float]) -> StepCauses:
    parts = {cause: CausePart(1000.0 * shares.get(cause, 0.0), 0.0, 3, 1.6) for cause in Cause}
    return StepCauses(1000.0, sum(part.ms for part in parts.values()), parts, 0.0, 0.0)


def told(series, cause=Cause.ROWS):
    """The changes, each with the index of the window in which it was told."""
    changes = Changes()
    return [
        (index, change) for index, share in enumerate(series) for change in changes.add(index, window({cause: share}))
    ]


@pytest.mark.thorough
@pytest.mark.parametrize("noise", [0.005, 0.02, 0.05])
def test_noise_is_no_change(noise):
    """A hundred runs of 300 windows, one window of 50 far away from the others."""
    for seed in range(100):
        draw = random.Random(seed)
        series = [0.2 + draw.gauss(0, noise) + (0.3 if draw.random() < 0.02 else 0.0) for _ in range(300)]
        assert told(series) == [], seed


@pytest.mark.parametrize(("noise", "step"), [(0.0, 0.04), (0.005, 0.06), (0.02, 0.25)])
def test_a_change_is_told_within_its_first_windows_and_once(noise, step):
    for seed in range(50):
        draw = random.Random(seed)
        series = [0.1 + draw.gauss(0, noise) for _ in range(30)]
        series += [0.1 + step + draw.gauss(0, noise) for _ in range(30)]
        found = told(series)
        assert len(found) == 1, (seed, found)
        index, change = found[0]
        assert index == 30 + NUM_CHANGED - 1
        assert (change.step, change.cause) == (30, Cause.ROWS)
        assert change.after - change.before == pytest.approx(step, abs=2 * noise + 1e-9)
        assert change.part.who == 3


def test_a_change_back_is_another_change():
    found = told([0.1] * 20 + [0.3] * 20 + [0.1] * 20)
    assert [(change.step, round(change.before, 3), round(change.after, 3)) for _, change in found] == [
        (20, 0.1, 0.3),
        (40, 0.3, 0.1),
    ]


def test_a_slow_change_is_told():
    found = told([0.1 + 0.002 * index for index in range(150)])
    assert found


def test_a_short_disturbance_is_no_change():
    assert told([0.1] * 20 + [0.5] * (NUM_CHANGED - 1) + [0.1] * 20) == []


def test_nothing_is_told_before_there_is_a_reference():
    assert told([0.1] * (NUM_REFERENCE - 1) + [0.5] * NUM_CHANGED) == []
    assert told([0.1] * NUM_REFERENCE + [0.5] * NUM_CHANGED) != []


def test_larger_change_comes_first_and_a_new_plan_restarts():
    changes = Changes()
    before, after = {Cause.PACE: 0.1, Cause.WIRE: 0.1}, {Cause.PACE: 0.5, Cause.WIRE: 0.2}
    found = [changes.add(index, window(before if index < 20 else after)) for index in range(24)]
    assert [change.cause for change in found[-1]] == [Cause.PACE, Cause.WIRE]
    changes.restart()
    assert not any(changes.add(index, window(before)) for index in range(20))
