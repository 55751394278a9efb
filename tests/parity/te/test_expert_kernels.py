"""Kernels of sixteen grouped experts of Transformer Engine, to which ours on CUDA are compared."""

from pathlib import Path

import pytest

from tests.parity.te.expert_kernels_worker import GROUPED_GEMM
from tests.ranks import launch

OURS = 7 + 11 + 4
"""See ``unit/model/local_experts/test_expert_kernels``."""

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]


def test_local_experts_have_at_most_a_fifth_more_kernels_than_te_grouped_experts(tmp_path):
    """Of Transformer Engine a grouped GEMM counts as one kernel, which it is on request; by default it is sixteen."""
    worker = Path(__file__).with_name("expert_kernels_worker.py")
    (result,) = launch.results_of(worker, 1, tmp_path, timeout_s=100, te=True)
    forward, backward = result["forward"], result["backward"]
    assert result["accumulated in the GEMM"]
    assert (forward[GROUPED_GEMM], backward[GROUPED_GEMM]) == (2, 4)
    of_te = sum(forward.values()) + sum(backward.values())
    assert of_te == 7 + 13
    assert of_te * 1.2 >= OURS
    assert of_te * 2.2 >= 2 * OURS
