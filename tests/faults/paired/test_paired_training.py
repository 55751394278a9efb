"""Faults in the real loop with a plan that pairs: NaN, errors while data are read, signals, a killed rank."""

import re
import signal

import pytest
from megatron.core.rerun_state_machine import EXIT_CODE_RESUME_TO_DISAMBIGUATE

from megatron_lancet.planning.plan_file import PlanFile, write_plan_file
from megatron_lancet.schedule.plan import fixed_plan, paired
from tests.faults.test_never_hangs import ENDS_WITHIN_S, WORKER, last_line
from tests.ranks import launch
from tests.ranks.preloaded import FULL_END
from tests.ranks.pretraining import EP2, command_line

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def run(token_data, tmp_path_factory):
    """Runs three steps of two ranks, in the second of which rank 1 meets the fault."""
    plan = tmp_path_factory.mktemp("plan") / "plan.json"
    write_plan_file(plan, PlanFile(paired(fixed_plan(1))))

    def run_with(fault: str, *extra: object, **env: str) -> list[launch.RankResult]:
        env |= {"LANCET_TEST_FAULT": fault, "LANCET_TEST_FAULTY_RANK": "1", "LANCET_TEST_TIMEOUT_S": "30"}
        arguments = command_line(token_data, [*EP2, "--train-iters", "3", "--lancet-plan", plan, *extra])
        return launch.run(WORKER, arguments, 2, tmp_path_factory.mktemp("run"), ENDS_WITHIN_S, env)

    return run_with


def test_nan_in_loss_ends_all_ranks_as_in_stock(run, tmp_path):
    """Megatron's check runs in the loss function, on the lane; the step is repeated, and the one before it saved."""
    results = run("nan", "--save", tmp_path, "--save-interval", 1000)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "1"
    assert [result.returncode for result in results] == [EXIT_CODE_RESUME_TO_DISAMBIGUATE] * 2
    assert "found NaN in local forward loss calculation" in results[1].output


def test_error_while_data_are_read_ends_all_ranks(run):
    results = run("error@data")
    assert [result.returncode for result in results] == [1, 1]
    assert results[1].output.splitlines()[-1].startswith("error: rank 1, 1 steps done, ")
    assert results[1].output.splitlines()[-1].endswith(": OSError: the data can't be read (injected)")
    assert re.match(
        r"error: rank 0 gave up on L1\.c0\.F\.\w+ .*: rank 1 closed the connection\.", last_line(results[0])
    )


def test_rank_killed_beside_a_backward_ends_the_other(run):
    """A backward of layer 2 runs during the forward of the next micro-batch."""
    results = run("kill@L2.c0.I.dispatch")
    assert [result.returncode for result in results] == [1, -signal.SIGKILL]
    assert re.match(
        r"error: rank 0 gave up on L\d\.c0\.[FI]\.\w+ .*: rank 1 closed the connection\.", last_line(results[0])
    )


def test_sigterm_during_a_paired_step_saves_a_checkpoint(run, tmp_path):
    """Also with a worker that loads data, which the lane's thread has started."""
    saved = tmp_path / "checkpoints"
    results = run("term@L2.c0.F.dispatch", "--save", saved, "--save-interval", 1000, "--num-workers", 1)
    launch.check(results)
    assert (saved / "latest_checkpointed_iteration.txt").read_text() == "2"
    assert results[0].output.count("rank 1 received SIGTERM: saving a checkpoint, then exiting.") == 1


def test_sigterm_without_save_ends_all_ranks(run):
    results = run("term@L2.c0.F.dispatch")
    assert [result.returncode for result in results] == [1, 128 + signal.SIGTERM]
    assert last_line(results[1]).startswith("error: SIGTERM ended rank 1, 1 steps done, ")
    assert "rank 1 closed the connection" in last_line(results[0])


def test_ctrl_c_during_a_paired_step_ends_all_ranks(run):
    results = run("int@L2.c0.F.dispatch")
    assert [result.returncode for result in results] == [1, 128 + signal.SIGINT]
    assert last_line(results[1]).startswith("error: SIGINT ended rank 1, 1 steps done, ")
    assert "rank 1 closed the connection" in last_line(results[0])


def test_run_without_a_fault_ends_without_a_word(run):
    """The lane's thread is still there when the interpreter ends."""
    results = run("none", **{FULL_END: "1"})
    launch.check(results)
    for result in results:
        for noise in ("Fatal Python error", "terminate called", "Traceback", "Exception ignored"):
            assert noise not in result.output
