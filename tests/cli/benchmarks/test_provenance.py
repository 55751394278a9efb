"""A result's commit is in the history, or documents quote the result with a mark."""

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks import provenance
from benchmarks.quoted.beside import RESULTS

REPO = Path(__file__).parents[3]


def git(*arguments: str) -> str:
    command = ["git", "-C", str(REPO), "-c", f"safe.directory={REPO}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture(scope="module")
def history() -> set[str]:
    """Returns the checked-out commit and its ancestors."""
    if not (REPO / ".git").exists() or git("rev-parse", "--is-shallow-repository") == "true":
        pytest.skip("no full history of git here")
    return set(git("rev-list", "HEAD").splitlines())


def test_results_without_a_commit_in_the_history_are_marked(history):
    due = {
        path.stem: mark
        for path in RESULTS.glob("*.json")
        if (mark := provenance.due_mark(json.loads(path.read_text()), history)) is not None
    }
    assert due == {name: entry["mark"] for name, entry in provenance.marked().items()}
