"""Faults in a paired step: every rank ends, or, within one process, the next step is as if nothing had happened."""

import pytest

from tests.faults.paired import injections
from tests.faults.paired.boundaries import OUT_OF_MEMORY
from tests.faults.paired.step import PLANS
from tests.ranks import launch

pytestmark = pytest.mark.distributed

NUM_INJECTIONS = 8


@pytest.mark.alone
def test_injected_faults_end_all_ranks_and_name_the_culprit(tmp_path):
    """A sample; the module's command runs as many as one likes, see docs/faults.md."""
    outcomes = injections.run(NUM_INJECTIONS, seed=0, at_once=2, folder=tmp_path)
    assert [f"{outcome.injection}: {outcome.problem}" for outcome in outcomes if outcome.problem] == []
    assert {outcome.injection.lane for outcome in outcomes} == {"forward", "backward"}


@pytest.fixture(scope="module")
def failed_steps(tmp_path_factory):
    worker = launch.REPO / "tests/faults/paired/failed_step_worker.py"
    return launch.results_of(worker, 2, tmp_path_factory.mktemp("failed"), timeout_s=150)


@pytest.mark.parametrize("plan", PLANS)
def test_step_after_a_failed_one_equals_an_undisturbed_one_bitwise(failed_steps, plan):
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


def test_steps_on_an_erratic_wire_end_with_the_bits_of_an_undisturbed_one(tmp_path):
    """Whose turn it is depends on no clock: ranks that are out of step wait for each other, and never for ever."""
    worker = launch.REPO / "tests/faults/paired/erratic_worker.py"
    for result in launch.results_of(worker, 2, tmp_path, timeout_s=120, args=[30]):
        assert result == {plan: [] for plan in PLANS}
