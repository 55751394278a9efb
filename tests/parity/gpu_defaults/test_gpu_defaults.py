"""Gradients with settings that GPU runs enable and CPU runs disable: ours against stock, EP=2 on two ranks."""

from pathlib import Path

import pytest

from tests.gradient_deviations import TOLERANCE
from tests.parity.gpu_defaults.cases import CASES
from tests.parity.gradients.variants import precision_of
from tests.ranks import launch

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(620)]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Per rank: the worker's result for each case."""
    worker = Path(__file__).with_name("worker.py")
    return launch.results_of(worker, 2, tmp_path_factory.mktemp("gpu_defaults"), timeout_s=600, te=True)


@pytest.mark.parametrize("case", CASES)
def test_gradients_with_defaults_of_gpus_equal_stock(results, case, check_gradients):
    bound = 0.0 if "k=1" in case.split("/") else TOLERANCE
    for rank, result in enumerate(results):
        found = result[case]
        check_gradients(found["gradients"], bound, f"rank {rank}", precision_of(case))
        assert found["loss"] <= bound
        assert found["logged"] <= bound
        assert found["logged_names_equal"]
        assert found["zero_gradients"] == []
        assert found["reports"] == dict.fromkeys(found["parameters"], 1)
