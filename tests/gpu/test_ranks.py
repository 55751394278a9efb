"""Several ranks, a GPU each, over NCCL; in the ordinary suite the same worker runs over gloo."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu.ranks_worker import PLANS
from tests.gpu.small_model import TOLERANCE
from tests.parity.gradients.gradients_worker import NUM_MICRO_BATCHES
from tests.ranks import launch

WORKER = Path(__file__).with_name("ranks_worker.py")
NUM_LAYERS = 2


def results_over_nccl(folder: Path) -> list[dict]:
    num_gpus = torch.cuda.device_count()
    if num_gpus < 2:
        pytest.skip(f"needs a CUDA device for each of two ranks, and sees {num_gpus}")
    num_ranks = 4 if num_gpus >= 4 else 2
    run_by_torchrun(num_ranks, folder)
    return [json.loads((folder / f"result.json.{rank}").read_text()) for rank in range(num_ranks)]


def run_by_torchrun(num_ranks: int, folder: Path) -> None:
    """Processes of their own: one that has used CUDA can't be forked."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    environment = launch.rank_environment(0, num_ranks, 0)
    done = subprocess.run(
        [*torchrun, WORKER, folder / "result.json"], env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


@pytest.fixture(scope="module", params=[pytest.param("nccl", marks=pytest.mark.gpu), "gloo"])
def results(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    if request.param == "nccl":
        return results_over_nccl(folder)
    if torch.cuda.device_count() > 0:
        pytest.skip("make test runs it over gloo, where no device is seen")
    return launch.results_of(WORKER, 2, folder, timeout_s=150)


@pytest.mark.distributed
@pytest.mark.parametrize("plans", PLANS)
def test_gradients_of_ranks_equal_stock(results, plans):
    for result in results:
        found = result[plans]
        assert found["loss"] <= TOLERANCE
        assert max(found["gradients"].values()) <= TOLERANCE
        assert set(found["num_reports"]) == {2 * NUM_MICRO_BATCHES}


@pytest.mark.distributed
def test_ranks_launch_the_same_number_of_messages(results):
    for result in results:
        assert result["k=2"]["num_all_to_alls"] == NUM_LAYERS * 2 * 2 * 2 * NUM_MICRO_BATCHES
