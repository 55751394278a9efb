"""One training that meets one fault after another, and ends with the losses of an undisturbed one.

Every test goes on in the folder of checkpoints which the one before has left: they run in this order.
"""

import re
import signal
from pathlib import Path

import pytest

from megatron_lancet.checkpoint.files import find_damage
from tests.faults.test_never_hangs import WORKER, last_line
from tests.ranks import launch
from tests.ranks.pretraining import EP2, Run, command_line, pretrain

pytestmark = pytest.mark.distributed

NUM_ITERS = 8
OURS = [*EP2, "--lancet-num-chunks", "2"]
FAULTY_RANK = 1
TRACKER = "latest_checkpointed_iteration.txt"


STILL_2 = r"The latest checkpoint there is still from step 2: start again with --load {}\."


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, token_data) -> Run:
    return pretrain(token_data, OURS, tmp_path_factory.mktemp("undisturbed"), train_iters=NUM_ITERS)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("checkpoints") / "saved"


def saving(checkpoints: Path, every: int) -> list[object]:
    return [*OURS, "--load", checkpoints, "--save", checkpoints, "--save-interval", every]


def struck(token_data, folder: Path, fault: str, *extra: object) -> list[launch.RankResult]:
    """A run in which rank 1 meets a fault in its second step, or in the checkpoint after it."""
    env = {"LANCET_TEST_FAULT": fault, "LANCET_TEST_FAULTY_RANK": str(FAULTY_RANK), "LANCET_TEST_TIMEOUT_S": "60"}
    arguments = command_line(token_data, ["--train-iters", NUM_ITERS, *extra])
    return launch.run(WORKER, arguments, 2, folder, timeout_s=60, env=env)


def entries(checkpoints: Path) -> list[str]:
    return sorted(path.name for path in checkpoints.iterdir() if path.name != TRACKER)


def latest(checkpoints: Path) -> str:
    return (checkpoints / TRACKER).read_text()


def test_sigterm_saves_a_checkpoint_and_ends_all_ranks(token_data, checkpoints, tmp_path):
    """SLURM signals all processes of a step: the workers that load data must live until the step is done."""
    results = struck(token_data, tmp_path, "term@L2.c0.F.dispatch", *saving(checkpoints, 1), "--num-workers", 1)
    launch.check(results)
    assert results[0].output.count("rank 1 received SIGTERM: saving a checkpoint, then exiting.") == 1
    assert "Megatron-Lancet report" in results[0].output
    assert (entries(checkpoints), latest(checkpoints)) == (["iter_0000001", "iter_0000002"], "2")


def test_full_disk_keeps_the_latest_checkpoint(token_data, checkpoints, tmp_path):
    results = struck(token_data, tmp_path, "full@save", *saving(checkpoints, 2))
    assert [result.returncode for result in results] == [1, 1]
    for result in results:
        assert re.fullmatch(
            rf"error: the checkpoint of step 4 could not be saved in {checkpoints}: rank 1: No space left on device\. "
            rf"[\d.]+ MB are free there: free some space; incomplete_\* can go\. {STILL_2.format(checkpoints)}",
            last_line(result),
        )
    assert (entries(checkpoints), latest(checkpoints)) == (
        ["incomplete_iter_0000004", "iter_0000001", "iter_0000002"],
        "2",
    )


def test_rank_killed_while_saving_keeps_the_latest_checkpoint(token_data, checkpoints, tmp_path):
    results = struck(token_data, tmp_path, "kill@save", *saving(checkpoints, 2))
    assert [result.returncode for result in results] == [1, -signal.SIGKILL]
    assert re.fullmatch(
        rf"error: the checkpoint of step 4 could not be saved in {checkpoints}: another rank is gone\. "
        + STILL_2.format(checkpoints),
        last_line(results[0]),
    )
    assert (entries(checkpoints), latest(checkpoints)) == (
        ["incomplete_iter_0000004", "iter_0000001", "iter_0000002"],
        "2",
    )


def test_resumed_run_equals_uninterrupted_run_bitwise(undisturbed, token_data, checkpoints, tmp_path):
    """With a worker that loads data and ignores SIGTERM: it must not keep the run from ending."""
    extra = [*saving(checkpoints, 2), "--num-workers", 1]
    run = pretrain(token_data, extra, tmp_path, train_iters=NUM_ITERS)
    for name in ("lm loss", "grad norm"):
        assert run.series(name) == undisturbed.series(name)[2:]
    assert entries(checkpoints) == [f"iter_000000{step}" for step in (1, 2, 4, 6, 8)]
    assert latest(checkpoints) == "8"


def test_cut_checkpoint_is_refused(undisturbed, token_data, checkpoints, tmp_path):
    part = checkpoints / "iter_0000008" / "__1_0.distcp"
    content = part.read_bytes()
    part.write_bytes(content[: len(content) // 2])
    results = struck(token_data, tmp_path, "none", *saving(checkpoints, 2))
    assert [result.returncode for result in results] == [2, 2]
    for result in results:
        assert re.fullmatch(
            rf"error: the checkpoint {checkpoints}/iter_0000008, named by {TRACKER}, can't be loaded: "
            rf"__1_0\.distcp is truncated: {len(content) // 2} bytes of {len(content)}\. "
            r"Complete there: steps 1, 2, 4, 6\. "
            rf"To go on from step 6 pass --ckpt-step 6, or write 6 into {checkpoints}/{TRACKER}\. "
            r"Nothing was changed\.",
            last_line(result),
        )


def test_older_checkpoint_replaces_the_cut_one(undisturbed, token_data, checkpoints, tmp_path):
    extra = [*saving(checkpoints, 2), "--ckpt-step", 6]
    run = pretrain(token_data, extra, tmp_path, train_iters=NUM_ITERS)
    for name in ("lm loss", "grad norm"):
        assert run.series(name) == undisturbed.series(name)[6:]
    assert entries(checkpoints) == [f"iter_000000{step}" for step in (1, 2, 4, 6, 8)]
    assert find_damage(checkpoints / "iter_0000008", "torch_dist") is None
