"""The check finds bugs that Megatron has or had, and nothing where there is none."""

import json
from pathlib import Path

import pytest

from benchmarks.checks.bugs import BUGS
from tests.ranks import launch

WORKER = Path(__file__).with_name("check_worker.py")
INJECTED = [bug.name for bug in BUGS if bug.prepare is not None and not bug.is_ours]
OF_THE_OVERLAP = [bug for bug in BUGS if bug.is_ours]
pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("check")
    launch.check(launch.run(WORKER, [folder / "result.json"], 1, folder, timeout_s=220))
    return json.loads((folder / "result.json").read_text())


@pytest.mark.parametrize("name", INJECTED)
def test_check_finds_bugs_that_are_put_back(found, name):
    bug = next(bug for bug in BUGS if bug.name == name)
    wrong = found["wrong"][name]
    assert any(bug.shown in one for one in wrong), wrong
    # Bugs of the norm leave gradients alone.
    assert (wrong == ["grad norm"]) == (bug.shown == "grad norm")


@pytest.mark.parametrize("bug", OF_THE_OVERLAP, ids=lambda bug: bug.name)
def test_check_finds_bugs_of_the_overlap_and_says_that_stock_is_right(found, bug):
    told = found["ours"][bug.name]
    assert told["stock"] == []
    assert any(bug.shown in one for one in told["ours"]), told["ours"]
    of_stock, of_the_overlap = told["report"].split("the overlap, compared with stock with this layout")
    assert "DIFFERS" not in of_stock
    assert "DIFFERS" in of_the_overlap
    assert "differs: " in of_the_overlap
    # A dW that is lost changes its own gradient and the norm, and nothing else.
    if bug.name == "dropped dW":
        assert all(one == "grad norm" or bug.shown in one for one in told["ours"])


def test_check_finds_what_the_installed_version_gets_wrong_and_what_it_takes(found):
    bug = found["in full"]
    assert bug["found"]
    assert bug["worst"][0].endswith("mlp.router.weight")
    assert bug["worst"][1] > 0.1
    assert bug["guilty"] == ["TP", "the routers' balancing loss", "loss per token"]


def test_check_of_a_launch_without_bugs_finds_none(found):
    equal = found["without"]
    assert not equal["differs"]
    assert equal["num_ranks"] == 4
    assert 0 < max(equal["errors"].values()) < 1e-5


def test_check_of_layers_of_transformer_engine(tmp_path):
    """With the tests' kernels: its real ones need a GPU."""
    worker = WORKER.with_name("te_worker.py")
    launch.check(launch.run(worker, [tmp_path / "result.json"], 1, tmp_path, timeout_s=120, te=True))
    found = json.loads((tmp_path / "result.json").read_text())
    assert found["changes"] == ["not checked: Transformer Engine's kernels (--moe-permute-fusion)"]
    assert "--moe-grouped-gemm" in found["words"]
    for side in ("stock", "ours"):
        assert found[side]["wrong"] == []
        assert any("layer_norm_weight" in name for name in found[side]["parameters"]), (
            "a norm in a linear layer is TE's"
        )


def test_runs_that_do_not_end_well_say_why(found):
    assert found["refused"].startswith("RefusedRunError: ")
    assert found["hung"].startswith("FailedRunError: ranks still ran after 0.05 s")
