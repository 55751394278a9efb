"""Runs of pytest with skipped tests: where CI is set, a skip fails unless its reason is listed in tests/skips.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
def test_skip_for_an_unlisted_reason_fails_only_in_ci(tmp_path, in_two_processes):
    (tmp_path / "test_sample.py").write_text(SAMPLE)
    (tmp_path / "test_module.py").write_text(WHOLE_MODULE)
    flags = ["-p", "tests.skips", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    flags += ["-p", "xdist", "-n", "2"] if in_two_processes else []
    command = [sys.executable, "-m", "pytest", "-q", *flags, "--rootdir", tmp_path, tmp_path]
    outputs = {}
    for ci in ("", "true"):
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "CI": ci}
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        outputs[ci] = (done.returncode, done.stdout)
    status, output = outputs[""]
    assert (status, "1 passed, 3 skipped" in output) == (0, True), output
    status, output = outputs["true"]
    assert status != 0
    for reason in ("needs a second moon", "needs a third moon"):
        assert f"skipped in CI: {reason}. CI expects this test to run" in output
    assert "skipped in CI: no Chromium" not in output
