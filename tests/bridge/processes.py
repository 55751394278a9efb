"""New processes for Megatron-Bridge, whose folder has other versions of packages."""

import importlib.util
import os
import subprocess
import sys

import pytest

from tests.ranks import launch

NEEDS_BRIDGE = pytest.mark.skipif(
    importlib.util.find_spec("megatron.bridge") is None, reason="needs Megatron-Bridge: make test-bridge"
)
BRIDGE = os.environ.get("PYTHONPATH", "").split(os.pathsep)[0]


def run(*words: object, timeout_s: float) -> str:
    """Runs Python with these words of a command line; returns what it printed. Fails if its status is not 0."""
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([BRIDGE, str(launch.REPO)]), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout
