"""Runs of pytest with a Hypothesis test: the same draws in every environment, new draws for a nightly seed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
SAMPLE = """
from pathlib import Path
from hypothesis import given
from hypothesis import strategies as st
from tests.draws import examples

def note(name, number):
    with Path(__file__).with_name(name).open("a") as file:
        print(number, file=file)

@given(st.integers())
def test_of_the_usual_size(number):
    note("usual", number)

@examples(5)
@given(st.integers())
def test_of_five(number):
    note("five", number)
"""
PLUGINS = ["-p", "_hypothesis_pytestplugin", "-p", "tests.draws", "-p", "no:cacheprovider"]
ALONE = ["-k", "five"]


@pytest.fixture
def drawn(tmp_path):
    """Runs the sample with flags and environment variables; returns the draws of its tests by name and the output."""

    def run(*flags: str, **environment: str) -> tuple[dict[str, list[str]], str]:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        (folder / "test_sample.py").write_text(SAMPLE)
        variables = {name: value for name, value in os.environ.items() if name != "CI"}
        variables |= {"PYTHONPATH": str(REPOSITORY), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **environment}
        command = [sys.executable, "-m", "pytest", *PLUGINS, "--rootdir", folder, *flags, folder]
        done = subprocess.run(command, env=variables, cwd=folder, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        found = {name: folder / name for name in ("usual", "five")}
        return {name: path.read_text().split() for name, path in found.items() if path.exists()}, done.stdout

    return run


def test_draws_are_same_in_any_environment_and_for_test_alone(drawn):
    first, output = drawn()
    assert {name: len(numbers) for name, numbers in first.items()} == {"usual": 100, "five": 5}
    assert "Hypothesis draws: the same in every run" in output
    alone, _ = drawn("--hypothesis-seed", "3", *ALONE, CI="true", PYTHONHASHSEED="7")
    assert alone == {"five": first["five"]}


def test_nightly_draws_are_more_and_those_of_the_printed_seed(drawn):
    nightly = ["--hypothesis-profile", "nightly", "--hypothesis-seed"]
    first, output = drawn(*nightly, "1")
    assert {name: len(numbers) for name, numbers in first.items()} == {"usual": 1000, "five": 50}
    assert "Hypothesis draws: new, 10 times as many; repeat with make test-nightly SEED=1" in output
    again, _ = drawn(*nightly, "1", *ALONE)
    assert again == {"five": first["five"]}
    other, _ = drawn(*nightly, "2", *ALONE)
    assert len(other["five"]) == 50
    assert other != again
