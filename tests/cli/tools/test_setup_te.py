"""The set-up of the tests' Transformer Engine, with a stand-in of the environment's Python that writes as pip would."""

import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]
REQUIREMENTS = REPOSITORY / "requirements-te.txt"
# python -m pip --disable-pip-version-check --quiet COMMAND ..., as tools/setup_te.sh calls it
PYTHON = """#!/bin/sh
echo "$@" >> "$(dirname "$0")/calls"
[ ! -e "$(dirname "$0")/offline" ] || exit 1
while [ $# -gt 0 ]; do
    case $1 in
        --target) mkdir -p "$2/transformer_engine" ;;
        --dest) mkdir -p "$2" && : > "$2/transformer_engine_torch.tar.gz" ;;
    esac
    shift
done
"""


@pytest.fixture
def venv(tmp_path):
    folder = tmp_path / "a venv" / "bin"
    folder.mkdir(parents=True)
    python = folder / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    return folder.parent


def set_up(venv: Path) -> tuple[int, list[str]]:
    """Exit status, and how pip was called."""
    calls = venv / "bin" / "calls"
    calls.write_text("")
    status = subprocess.run(["sh", REPOSITORY / "tools" / "setup_te.sh", venv], timeout=60).returncode
    return status, calls.read_text().splitlines()


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


COMPLETE = ["requirements-te.txt", "sdist", "sdist/transformer_engine_torch.tar.gz", "transformer_engine"]


def test_te_setup_unpacks_wheels_and_pinned_source_distribution(venv):
    status, calls = set_up(venv)
    version = next(line for line in REQUIREMENTS.read_text().splitlines() if line.startswith("transformer-engine=="))
    assert status == 0
    assert [call.split()[4] for call in calls] == ["install", "download"]
    assert calls[1].endswith(version.replace("transformer-engine", "transformer-engine-torch"))
    assert names(venv / "te") == COMPLETE
    assert set_up(venv) == (0, [])


def test_te_setup_that_was_interrupted_begins_anew(venv):
    (venv / "te.new" / "half").mkdir(parents=True)
    assert set_up(venv)[0] == 0
    assert names(venv / "te") == COMPLETE
    assert not (venv / "te.new").exists()


def test_te_setup_replaces_what_other_requirements_installed(venv):
    (venv / "te" / "old").mkdir(parents=True)
    (venv / "te" / "requirements-te.txt").write_text("transformer-engine==1.0\n")
    assert set_up(venv)[0] == 0
    assert names(venv / "te") == COMPLETE


def test_te_setup_without_network_changes_nothing(venv):
    (venv / "te" / "old").mkdir(parents=True)
    (venv / "bin" / "offline").touch()
    assert set_up(venv)[0] != 0
    assert names(venv / "te") == ["old"]
