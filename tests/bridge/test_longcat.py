"""Wired Megatron layers against LongCat-Flash of ``transformers``: the same weights, the same logits."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from tests.ranks import launch

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron.bridge") is None, reason="needs Megatron-Bridge: make test-bridge"
)
WORKER = launch.REPO / "tests/bridge/longcat_worker.py"
BRIDGE = os.environ.get("PYTHONPATH", "").split(os.pathsep)[0]
TOLERANCE = 1e-6
"""Of the largest logit: sums in another order, fp32."""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """In a new process: Bridge's folder has another version of transformers."""
    out = tmp_path_factory.mktemp("longcat") / "found.json"
    done = subprocess.run(
        [sys.executable, WORKER, out],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([BRIDGE, str(launch.REPO)]), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return json.loads(out.read_text())


@pytest.mark.parametrize("num_identity_experts", [0, 4])
def test_logits_are_those_of_transformers(found, num_identity_experts):
    assert found[str(num_identity_experts)]["logits"] <= TOLERANCE


@pytest.mark.parametrize("num_identity_experts", [0, 4])
def test_other_routers_are_noticed(found, num_identity_experts):
    assert found[str(num_identity_experts)]["without_the_factor"] > 0.01
