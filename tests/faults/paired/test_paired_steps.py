"""Faults in a paired step: every rank ends, or, within one process, the next step is as if nothing had happened."""

import random
import time
from contextlib import ExitStack

import pytest
import torch.distributed as dist

from megatron_lancet.patching import around, replaced
from tests.faults.paired import injections
from tests.faults.paired.boundaries import OUT_OF_MEMORY
from tests.faults.paired.failed_step_worker import all_attempts
from tests.faults.paired.step import PLANS, PairedStep
from tests.ranks import launch

pytestmark = pytest.mark.distributed

SLOW_S = 2e-3
NUM_INJECTIONS = 8


def disturb(seed: int, stack: ExitStack) -> None:
    """Differently on each rank: what polls a message sees it done or not by chance, and some launches come late."""
    from megatron_lancet.runtime.comm import Comm
    from megatron_lancet.runtime.transport.works import WorksTransfer

    dice = random.Random(f"{seed} {dist.get_rank()}")
    probability = dice.random()
    stack.enter_context(replaced(WorksTransfer, "done", lambda _: dice.random() < probability))

    def late(launch, comm, *args):
        if dice.random() < 0.2:
            time.sleep(SLOW_S * dice.random())
        return launch(comm, *args)

    for name in ("launch", "launch_when_known", "launch_counts"):
        stack.enter_context(around(Comm, name, late))


def unequal_seeds(plan: str, num_seeds: int) -> list[int]:
    """Seeds with which a step's losses or gradients differ from an undisturbed step's."""
    with ExitStack() as stack:
        step = PairedStep(PLANS[plan], 60.0, stack)
        step.run()
        expected = step.run(traced=False), step.gradients()
        unequal = []
        for seed in range(num_seeds):
            with ExitStack() as disturbed:
                disturb(seed, disturbed)
                losses, gradients = step.run(traced=False), step.gradients()
            if losses != expected[0] or any(not gradients[name].equal(expected[1][name]) for name in gradients):
                unequal.append(seed)
    return unequal


def unequal_seeds_of_plans(num_seeds: int) -> dict[str, list[int]]:
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(expert_model_parallel_size=2, create_gloo_process_groups=False)
    return {plan: unequal_seeds(plan, num_seeds) for plan in PLANS}


@pytest.mark.alone
def test_injected_faults_end_all_ranks_and_name_the_culprit(tmp_path):
    """A sample; the module's command runs as many as one likes, see docs/faults.md."""
    outcomes = injections.run(NUM_INJECTIONS, seed=0, at_once=2, folder=tmp_path)
    assert [f"{outcome.injection}: {outcome.problem}" for outcome in outcomes if outcome.problem] == []
    assert {outcome.injection.lane for outcome in outcomes} == {"forward", "backward"}


failed_steps = launch.results(all_attempts, 2)


@pytest.mark.parametrize("plan", PLANS)
def test_step_after_a_failed_one_equals_an_undisturbed_one(failed_steps, plan):
    for result in failed_steps:
        steps = result[plan]
        assert len(steps["places"]) >= 20
        assert set(steps["errors"]) == {OUT_OF_MEMORY}
        assert steps["left"] == []
        assert steps["unequal"] == []
        assert steps["num_threads"] == 1


@pytest.mark.parametrize("plan", PLANS)
def test_failed_step_keeps_no_activations(failed_steps, plan):
    """What its unfinished messages keep is released by the end of the next step."""
    for result in failed_steps:
        assert max(result[plan]["alive"]) == result[plan]["alive_at_begin"] == 0


@pytest.mark.parametrize("plan", PLANS)
def test_activations_are_counted(failed_steps, plan):
    assert all(result[plan]["most_alive"] > 50 for result in failed_steps)


def test_steps_on_an_erratic_wire_equal_an_undisturbed_one(tmp_path):
    """Whose turn it is depends on no clock: ranks that are out of step wait for each other, and never forever."""
    for result in launch.results_of(unequal_seeds_of_plans, 2, tmp_path, args=[15]):
        assert result == {plan: [] for plan in PLANS}
