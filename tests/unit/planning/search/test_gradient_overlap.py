"""Reductions of gradients during the backward pass: what they hide, in forecasts of other sizes and in plans."""

import dataclasses

import pytest

from benchmarks.synthetic_profile import Machine, synthetic_profile
from megatron_lancet.lab.what_if.forecast import Forecaster, NetworkChoice
from megatron_lancet.planning.search.gradient_overlap import measured_with, with_reduction
from megatron_lancet.planning.search.planner import make_plan
from megatron_lancet.planning.search.search_space import Limits
from megatron_lancet.planning.simulation.simulator import simulate
from megatron_lancet.schedule.plan import ChunkDim, DwPolicy, OverlapRange, fixed_plan
from megatron_lancet.schedule.reductions import GradientReduction

MB = 1_000_000
# 6 ms of experts; a rank has 512 rows of 1000 bytes.
MACHINE = Machine("mm", shares=(0.25,) * 4, latency_ms=0.0, link_ms=1.0, rest_ms=0.0, overhead_ms=0.0)


def two_chunks(profile):
    return fixed_plan(2, DwPolicy.NONE)


def forecasts(profile):
    """By EP size, on a network of 64 bytes a us."""
    forecaster = Forecaster(profile, NetworkChoice(4, 0.512, 0.0))
    return {size: forecaster.forecast(forecaster.layout(4, size), two_chunks) for size in (4, 2, 1)}


def overlapped(reduce_ms=4.0, machine=MACHINE):
    """A profile whose all-reduce of 1 MB over 4 ranks takes ``reduce_ms``, and how it is reduced."""
    profile = synthetic_profile(dataclasses.replace(machine, rest_ms=50.0))
    link = dataclasses.replace(profile.link, all_reduce=((0, 0.0), (MB, reduce_ms)))
    return dataclasses.replace(profile, link=link), GradientReduction(4, bucket_bytes=MB)


def test_fewer_expert_parallel_ranks_reduce_more():
    """Three gradients of 1 MB stay dense; two layers' experts of 1 MB become 2 and 4 MB."""
    per_mb = 1000 / 64
    expected = [1.5 * 3 * per_mb, (1.5 * 3 + 1 * 2 * 2) * per_mb, 1.5 * (3 + 2 * 4) * per_mb]
    found = forecasts(synthetic_profile(MACHINE))
    # A ring of n ranks passes 2 (n - 1) / n of the bytes.
    assert [one.gradient_ms for one in found.values()] == pytest.approx(expected)


def test_only_reductions_that_outlast_the_backward_count():
    profile, rules = overlapped()
    beside = with_reduction(profile, rules)
    assert beside.rest_ms == pytest.approx(50 - 3 * 4)
    assert with_reduction(beside, None) == profile
    assert with_reduction(beside, rules) == beside
    plan = fixed_plan(2)
    expected = simulate(dataclasses.replace(profile, gradients=rules), plan).prediction
    measured = measured_with(profile, rules, [plan])
    assert measured.rest_ms == pytest.approx(50 - expected.gradient_ms)
    assert simulate(measured, plan).prediction.step_ms == pytest.approx(expected.step_ms - expected.gradient_ms)


def test_forecast_of_reductions_during_the_backward():
    profile, rules = overlapped(reduce_ms=15.0)
    after = forecasts(profile)
    beside = forecasts(with_reduction(profile, rules))
    for size, one in beside.items():
        assert 0 < one.gradient_ms < after[size].gradient_ms
        assert one.step_ms < after[size].step_ms
    moved = Forecaster(with_reduction(profile, rules), NetworkChoice(4, 0.512, 0.0))
    at_one = moved.moved(moved.layout(4, 1))
    assert (at_one.gradients.dense_ranks, at_one.gradients.expert_ranks) == (4, 4)
    assert at_one.link.all_reduce[-1][1] == pytest.approx(1.5 * at_one.link.all_reduce[-1][0] / 64_000)
    assert moved.moved(moved.layout(8, 4)).gradients.expert_ranks == 2


@pytest.mark.thorough
def test_plans_are_chosen_with_reductions_on_the_link():
    """What wins without them need not win with them; the winner's figures are those of the whole simulation."""
    machine = dataclasses.replace(MACHINE, layers="mmm", link_ms=6.0, chunk_counts=(1, 2))
    profile, rules = overlapped(reduce_ms=8.0, machine=machine)
    beside = with_reduction(profile, rules)
    limits = Limits(ranges=(OverlapRange.STACK, OverlapRange.EXPERTS), chunk_dims=(ChunkDim.BATCH,))
    planned = make_plan(beside, limits)
    assert planned.prediction == simulate(beside, planned.plan).prediction
    assert planned.prediction.gradient_ms > 0
    assert planned.no_overlap is not None
    assert planned.prediction.step_ms <= simulate(beside, make_plan(profile, limits).plan).prediction.step_ms
    assert make_plan(beside, limits) == planned
