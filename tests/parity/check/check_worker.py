"""Checks of launches with known bugs, and of one without, on forks of this process.

Usage: check_worker.py RESULT.json
"""

import faulthandler
import json
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.checks.__main__ import check_bug
from benchmarks.checks.bugs import BASE, BUGS, Bug
from megatron_lancet.lab.check.check import Checker, check
from megatron_lancet.lab.check.layout import Layout
from megatron_lancet.lab.check.ranks import FailedRunError, RefusedRunError, run_ranks
from megatron_lancet.lab.check.report import report
from megatron_lancet.lab.check.shrink import shrink
from megatron_lancet.lab.check.words import read_command_line
from megatron_lancet.lab.check.worker import Task

TIMEOUT_S = 60.0
IN_FULL = "#7452 (10)"
"""The bug whose axes are looked for, too."""
WITHOUT_BUGS = (
    *BASE,
    *"--pipeline-model-parallel-size 4 --expert-model-parallel-size 8 --use-distributed-optimizer".split(),
)
OF_DOCUMENTS = (*BASE, *"--expert-model-parallel-size 8 --dataloader-inter-document-masking".split())


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


def main() -> None:
    faulthandler.register(signal.SIGUSR1, all_threads=True)
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
    Path(sys.argv[1]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
