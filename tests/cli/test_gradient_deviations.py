"""The line about the worst gradient deviation at the end of a test run, with and without pytest-xdist."""

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
TESTS = """
def test_small(check_gradients):
    check_gradients({"embedding": 1e-7, "router": 3e-7}, 2e-6)

def test_large(check_gradients):
    check_gradients({"embedding": 1.5e-6, "router": 3e-7}, 2e-6)
    check_gradients({"embedding": 0.0}, 0.0)

def test_bf16(check_gradients):
    check_gradients({"output": 4e-3}, 1e-2, precision="bf16")

"""
DAMAGED = """
def test_damaged(check_gradients):
    check_gradients({"embedding": 1e-7, "router": float("nan")}, 2e-6, "rank 1")
"""


def run_tests(folder: Path, *arguments: str) -> tuple[int, str]:
    """Exit status and output of the tests in a folder, in an own pytest."""
    command = [sys.executable, "-m", "pytest", "-p", "tests.gradient_deviations", "-p", "no:cacheprovider", *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"PYTHONPATH": str(REPOSITORY), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout


def test_worst_deviation_is_printed_once_for_each_precision(tmp_path):
    (tmp_path / "test_some.py").write_text(TESTS)
    status, output = run_tests(tmp_path, "-p", "xdist", "-n", "2")
    assert status == 0
    assert [line for line in output.splitlines() if line.startswith("worst gradient deviation")] == [
        "worst gradient deviation of this run, bf16: 4.00e-03 in test_some.py::test_bf16 (parameter output)",
        "worst gradient deviation of this run, fp32: 1.50e-06 in test_some.py::test_large (parameter embedding)",
    ]


def test_nan_fails_the_test_and_is_the_worst(tmp_path):
    (tmp_path / "test_some.py").write_text(TESTS + DAMAGED)
    status, output = run_tests(tmp_path)
    assert status == 1
    assert "gradient of router deviates by inf, at most 2e-06 expected: rank 1" in output
    assert "worst gradient deviation of this run, fp32: inf in test_some.py::test_damaged (parameter router)" in output
