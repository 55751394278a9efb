"""Wired Megatron layers against LongCat-Flash of ``transformers``: the same weights, the same logits."""

import json

import pytest

from tests.bridge import processes
from tests.ranks import launch

pytestmark = processes.NEEDS_BRIDGE
WORKER = launch.REPO / "tests/bridge/longcat_worker.py"
TOLERANCE = 1e-6
"""Of the largest logit: sums in another order, fp32."""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    out = tmp_path_factory.mktemp("longcat") / "found.json"
    processes.run(WORKER, out, timeout_s=200)
    return json.loads(out.read_text())


@pytest.mark.parametrize("num_identity_experts", [0, 4])
def test_logits_equal_transformers(found, num_identity_experts):
    assert found[str(num_identity_experts)]["logits"] <= TOLERANCE


@pytest.mark.parametrize("num_identity_experts", [0, 4])
def test_other_routers_are_noticed(found, num_identity_experts):
    assert found[str(num_identity_experts)]["without_the_factor"] > 0.01
