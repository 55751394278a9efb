"""Delayed scaling, whose state is global, where a forward is under way beside each backward."""

from pathlib import Path

import pytest

from tests.gradient_deviations import TOLERANCE
from tests.parity.te.fp8_worker import NUM_STEPS
from tests.ranks import launch

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(500)]

WORKER = Path(__file__).with_name("fp8_pairs_worker.py")
IN_FP32 = ("delayed-in-fp32", "delayed-in-fp32-recompute")
"""Activations are fp32, so that nothing but the order of sums differs."""
NUM_WAITS = NUM_STEPS * 4 * 3 * 2
"""Of one chunk: steps, micro-batches, layers, dispatch and combine."""


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fp8-pairs")
    return launch.results_of(WORKER, 2, folder, timeout_s=400, args=(*IN_FP32, "delayed-recompute"), te=True)


@pytest.mark.parametrize(
    ("recipe", "num_chunks"), [*((name, k) for name in IN_FP32 for k in (1, 2)), ("delayed-recompute", 1)]
)
def test_scales_and_gradients_of_paired_steps_are_stocks(results, recipe, num_chunks, check_gradients):
    """A context of fp8 that a recomputation opens must not show in the forward beside it."""
    for result in results:
        found = result[f"{recipe}/k={num_chunks}"]
        assert found["num_waits"] == num_chunks * NUM_WAITS
        assert found["num_scaling"] > 0
        assert found["other_scaling"] == []
        assert found["num_stashed"] == 0
        assert found["loss"] == 0
        for gradients in found["gradients"]:
            check_gradients(gradients, 0.0 if num_chunks == 1 else TOLERANCE, recipe, "fp8")
