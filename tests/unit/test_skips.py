"""Tests that CI leaves out: only those whose reason is listed. And who sees a GPU."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import conftest, skips

REPOSITORY = Path(__file__).parents[2]
SAMPLE = """
import pytest

def test_skipped_for_a_listed_reason():
    pytest.skip("no Chromium: apt-get install chromium")

@pytest.mark.skipif(True, reason="needs a second moon")
def test_skipped_for_another_reason(): ...

def test_passes(): ...
"""
WHOLE_MODULE = "import pytest\npytest.skip('needs a third moon', allow_module_level=True)\n"


@pytest.mark.parametrize("in_two_processes", [False, True])
def test_an_unlisted_skip_fails_in_ci_alone(tmp_path, in_two_processes):
    (tmp_path / "test_sample.py").write_text(SAMPLE)
    (tmp_path / "test_module.py").write_text(WHOLE_MODULE)
    flags = [
        "-p",
        "tests.skips",
        "-p",
        "no:cacheprovider",
        "--continue-on-collection-errors",
        *(["-n", "2"] if in_two_processes else []),
    ]
    command = [sys.executable, "-m", "pytest", "-q", *flags, "--rootdir", tmp_path, tmp_path]
    outputs = {}
    for ci in ("", "true"):
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "CI": ci}
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        outputs[ci] = (done.returncode, done.stdout)
    status, output = outputs[""]
    assert (status, "1 passed, 3 skipped" in output) == (0, True), output
    status, output = outputs["true"]
    assert status != 0
    for reason in ("needs a second moon", "needs a third moon"):
        assert f"skipped in CI: {reason}. CI expects this test to run" in output
    assert "skipped in CI: no Chromium" not in output


@pytest.mark.parametrize(
    ("reason", "allowed"),
    [
        ("Skipped: no Chromium: apt-get install chromium", True),
        ("can't make the test network: ip netns add: Operation not permitted.", True),
        ("the network benchmark needs root, to make network namespaces; this is user 1000.", False),
        ("shellcheck is not installed", False),
    ],
)
def test_reasons_are_told_apart_by_how_they_begin(reason, allowed):
    assert skips.is_allowed(reason) == allowed


def test_listed_reasons_are_still_given_somewhere():
    sources = [*(REPOSITORY / "tests").rglob("*.py"), *(REPOSITORY / "benchmarks").rglob("*.py")]
    texts = [path.read_text() for path in sources if path.name not in ("skips.py", "test_skips.py")]
    assert [reason for reason in skips.ALLOWED if not any(reason in text for text in texts)] == []


@pytest.mark.parametrize(
    ("arguments", "visible"),
    [
        (["tests"], ""),
        (["tests/gpu", "tests/unit"], ""),
        (["tests/gpu"], "0"),
        (["tests/gpu/test_stream_transport.py::test_counts_reach_the_host"], "0"),
    ],
)
def test_gpus_are_seen_by_gpu_tests_alone(monkeypatch, arguments, visible):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    conftest.pytest_configure(SimpleNamespace(args=arguments, invocation_params=SimpleNamespace(dir=REPOSITORY)))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == visible
