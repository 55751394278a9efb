"""The tests' permutation in torch equals Transformer Engine's Triton kernels, run by Triton's interpreter."""

from pathlib import Path

import pytest

from tests.ranks import launch

pytestmark = pytest.mark.distributed

WORKER = Path(__file__).with_name("permutation_worker.py")


def test_te_permutation_equals_triton_kernels(tmp_path):
    (differences,) = launch.results_of(WORKER, 1, tmp_path, 150, te=True)
    assert len(differences) == 12
    # A kernel sums the gradient of a probability in another order.
    assert {name: found for name, found in differences.items() if max(found) > 2e-6} == {}
    exact = {name: found for name, found in differences.items() if not name.startswith("merging")}
    assert {name: found for name, found in exact.items() if any(found)} == {}
