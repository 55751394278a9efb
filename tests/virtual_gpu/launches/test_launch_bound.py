"""The planner knows the time of the host: it predicts steps that launches bound, and chooses plans with few of them."""

import os
from dataclasses import replace
from itertools import product
from unittest import mock

import pytest

from megatron_lancet.planning.profile import Profile
from megatron_lancet.planning.search.planner import make_plan
from megatron_lancet.planning.search.search_space import Limits
from megatron_lancet.planning.simulation.cost_model import CostModel
from megatron_lancet.planning.simulation.simulator import Simulator
from megatron_lancet.schedule.dispatch import PLAIN
from megatron_lancet.schedule.plan import Plan
from megatron_lancet.training.platform.cpu import cpu_platform
from tests.virtual_gpu.launches.model import ONE, TWO, Recorded, device, recorded

LAUNCHES_US = (4, 8, 12)
FAST = 16.0
"""Speed of a device for which the model is small: its kernels are shorter than a launch takes."""
UNPAIRED = Limits(pairing=(False,), dispatches=(PLAIN,))


@pytest.fixture(scope="module")
def model() -> Recorded:
    with mock.patch.dict(os.environ, {"WORLD_SIZE": "8"}), cpu_platform():
        return recorded()


def without_host(profile: Profile) -> Profile:
    """A profile as if launching cost nothing."""
    return replace(
        profile,
        ops=tuple(replace(op, host_ms=0.0) for op in profile.ops),
        weight_grads=tuple(replace(dw, host_ms=0.0) for dw in profile.weight_grads),
    )


def predicted_ms(profile: Profile, plan: Plan) -> float:
    """Time of a micro-batch."""
    one = replace(profile, model=replace(profile.model, num_micro_batches=1))
    return Simulator(CostModel(one)).predict(plan).step_ms


@pytest.mark.parametrize("plan", [ONE, TWO], ids=str)
@pytest.mark.parametrize(("launch_us", "speed"), [(0, 1.0), *product(LAUNCHES_US, (1.0, FAST))])
def test_simulator_predicts_steps_with_launches(model, launch_us, speed, plan):
    gpu = device(launch_us, speed)
    assert predicted_ms(model.profile(gpu), plan) == pytest.approx(model.played(plan, gpu).step_us / 1e3, rel=0.03)


@pytest.mark.parametrize("launch_us", LAUNCHES_US)
def test_simulator_without_launches_is_wrong_about_them(model, launch_us):
    gpu = device(launch_us, FAST)
    profile = without_host(model.profile(gpu))
    assert predicted_ms(profile, TWO) < 0.95 * model.played(TWO, gpu).step_us / 1e3


@pytest.mark.parametrize("plan", [ONE, TWO], ids=str)
def test_profile_says_how_far_launches_bound_a_step(model, plan):
    for launch_us in LAUNCHES_US:
        gpu = device(launch_us, FAST)
        played = model.played(plan, gpu)
        share = model.profile(gpu).launch_bound[str(plan)]
        # Ops that are in part beside a message count less, and an op's kernels in full.
        assert 0.5 < share / (played.for_launches_us / played.step_us) < 1.1
    assert model.profile(device(0)).launch_bound[str(plan)] < 0.01
    assert model.profile(device(4)).launch_bound[str(plan)] < 0.01


@pytest.mark.parametrize("launch_us", LAUNCHES_US)
def test_plan_of_a_launch_bound_model_has_one_chunk_or_pairs(model, launch_us):
    gpu = device(launch_us, FAST)
    profile = model.profile(gpu)
    assert make_plan(profile, UNPAIRED).plan.num_chunks == 1
    either = make_plan(profile, Limits(dispatches=(PLAIN,))).plan
    assert either.is_paired
    assert either.num_chunks == 1
    assert model.played(ONE, gpu).step_us < model.played(TWO, gpu).step_us


@pytest.mark.parametrize("launch_us", [0, 4])
def test_plan_of_a_device_bound_model_has_chunks(model, launch_us):
    gpu = device(launch_us)
    assert make_plan(model.profile(gpu), UNPAIRED).plan.num_chunks > 1
    assert model.played(TWO, gpu).step_us < model.played(ONE, gpu).step_us


@pytest.mark.parametrize("launch_us", LAUNCHES_US)
def test_chunks_that_were_not_profiled_cost_launches(model, launch_us):
    """Half of the tokens take half of the device's time, and as many launches."""
    gpu = device(launch_us, FAST)
    profile = model.profile(gpu, [ONE])
    assert predicted_ms(profile, TWO) == pytest.approx(model.played(TWO, gpu).step_us / 1e3, rel=0.05)
    free = without_host(profile)
    assert predicted_ms(free, TWO) < predicted_ms(free, ONE)
