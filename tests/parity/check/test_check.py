"""The check finds bugs that Megatron has or had, and nothing where there is none."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.checks.__main__ import check_bug
from benchmarks.checks.bugs import BASE, BUGS, Bug
from megatron_lancet.lab.check.check import Checker, check
from megatron_lancet.lab.check.layout import Layout
from megatron_lancet.lab.check.ranks import FailedRunError, RefusedRunError, run_ranks
from megatron_lancet.lab.check.report import report
from megatron_lancet.lab.check.shrink import shrink
from megatron_lancet.lab.check.words import read_command_line
from megatron_lancet.lab.check.worker import Task
from megatron_lancet.patching import replaced
from megatron_lancet.training.platform import detect
from tests import te_cpu
from tests.ranks import launch

pytestmark = pytest.mark.distributed

TIMEOUT_S = 60.0
IN_FULL = "#7452 (10)"
"""The bug whose axes are looked for, too."""
WITHOUT_BUGS = (
    *BASE,
    *"--pipeline-model-parallel-size 4 --expert-model-parallel-size 8 --use-distributed-optimizer".split(),
)
OF_DOCUMENTS = (*BASE, *"--expert-model-parallel-size 8 --dataloader-inter-document-masking".split())
TE_LAUNCH = (
    *BASE,
    *"--tensor-model-parallel-size 4 --expert-model-parallel-size 8 --expert-tensor-parallel-size 1".split(),
    *"--sequence-parallel --transformer-impl transformer_engine --moe-grouped-gemm --moe-permute-fusion".split(),
)
INJECTED = [bug.name for bug in BUGS if bug.prepare is not None and not bug.is_ours]
OF_THE_OVERLAP = [bug for bug in BUGS if bug.is_ours]


def wrong_with(name: str) -> list[str]:
    """What stock's run with a bug has wrong."""
    bug = next(bug for bug in BUGS if bug.name == name)
    shrunk = shrink(read_command_line([*BASE, *bug.flags.split()]), None, 8, bug.padding)
    with tempfile.TemporaryDirectory() as folder:
        checker = Checker(shrunk, Path(folder), TIMEOUT_S, bug.padding, bug.prepare)
        return checker.stock(shrunk.words, shrunk.layout, seed=1).wrong


def told_of(bug: Bug) -> dict[str, Any]:
    """What the check has of a bug of the overlap, and what it says."""
    shrunk = shrink(read_command_line([*BASE, *bug.flags.split()]), None, 2)
    with tempfile.TemporaryDirectory() as folder:
        found = check(shrunk, Path(folder), timeout_s=TIMEOUT_S, prepare=bug.prepare)
    assert found.ours is not None, found.why_not_ours
    return {"stock": found.stock.wrong, "ours": found.ours.wrong, "report": report(found, 1.0)}


def without_bugs(launch: Sequence[str]) -> dict[str, Any]:
    shrunk = shrink(read_command_line(launch), None, 8)
    with tempfile.TemporaryDirectory() as folder:
        found = check(shrunk, Path(folder), timeout_s=TIMEOUT_S)
    assert found.ours is not None, found.why_not_ours
    compared = {name: max(one.parameters.values()) for name, one in (("stock", found.stock), ("ours", found.ours))}
    return {"differs": found.differs, "num_ranks": shrunk.layout.num_ranks, "errors": compared}


def refused(words: list[str], folder: Path, timeout_s: float = TIMEOUT_S) -> str:
    """How a run that does not end well is told."""
    try:
        run_ranks(Task((*words, *Layout().words(), "--lancet-plan", "off"), folder / "weights", folder), 1, timeout_s)
    except (RefusedRunError, FailedRunError) as error:
        return f"{type(error).__name__}: {error}"
    return "it ran"


def all_results() -> dict[str, Any]:
    """What is found for each case, by its name."""
    small = shrink(read_command_line(BASE), None, 8).words
    with tempfile.TemporaryDirectory() as folder:
        results: dict[str, Any] = {
            "refused": refused([*small, "--num-experts", "0"], Path(folder) / "refused"),
            "hung": refused(small, Path(folder) / "hung", timeout_s=0.05),
        }
    results["wrong"] = {bug.name: wrong_with(bug.name) for bug in BUGS if bug.prepare is not None and not bug.is_ours}
    results["ours"] = {bug.name: told_of(bug) for bug in BUGS if bug.is_ours}
    results["in full"] = check_bug(next(bug for bug in BUGS if bug.name == IN_FULL))
    results["without"] = without_bugs(WITHOUT_BUGS)
    results["documents"] = without_bugs(OF_DOCUMENTS)
    return results


def check_of_te() -> dict[str, object]:
    shrunk = shrink(read_command_line(TE_LAUNCH), None, 2, with_kernels=True)
    with tempfile.TemporaryDirectory() as folder, replaced(detect, "cpu_platform", te_cpu.te_platform):
        found = check(shrunk, Path(folder), timeout_s=TIMEOUT_S)
    assert found.ours is not None, found.why_not_ours
    result: dict[str, object] = {"changes": shrunk.changes, "words": shrunk.words}
    result |= {name: vars(one) | {"wrong": one.wrong} for name, one in (("stock", found.stock), ("ours", found.ours))}
    return result


found = launch.result(all_results, timeout_s=220, is_bare=True)


@pytest.mark.parametrize("name", INJECTED)
def test_check_finds_bugs_that_are_put_back(found, name):
    bug = next(bug for bug in BUGS if bug.name == name)
    wrong = found["wrong"][name]
    assert any(bug.shown in one for one in wrong), wrong
    # Bugs of the norm leave gradients alone.
    assert (wrong == ["grad norm"]) == (bug.shown == "grad norm")


@pytest.mark.parametrize("bug", OF_THE_OVERLAP, ids=lambda bug: bug.name)
def test_check_finds_bugs_of_the_overlap(found, bug):
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


def test_check_finds_a_bug_of_the_installed_version(found):
    bug = found["in full"]
    assert bug["found"]
    assert bug["worst"][0].endswith("mlp.router.weight")
    assert bug["worst"][1] > 0.1
    assert bug["causes"] == ["TP", "the routers' balancing loss", "loss per token"]


@pytest.mark.parametrize(("launch", "num_ranks"), [("without", 4), ("documents", 2)])
def test_check_of_a_launch_without_bugs_finds_none(found, launch, num_ranks):
    equal = found[launch]
    assert not equal["differs"]
    assert equal["num_ranks"] == num_ranks
    assert 0 < max(equal["errors"].values()) < 1e-5


def test_check_of_layers_of_transformer_engine(tmp_path):
    """With the tests' kernels: its real ones need a GPU."""
    (found,) = launch.results_of(check_of_te, 1, tmp_path, te=launch.Te(), is_bare=True)
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
