"""Fp8 as Transformer Engine's Python and the tests' kernels do it, against torch's casts and values worked by hand."""

from pathlib import Path

import pytest

from tests.parity.te_cpu.quantizers_worker import CHECKS
from tests.ranks import launch

pytestmark = pytest.mark.distributed

WORKER = Path(__file__).with_name("quantizers_worker.py")


@pytest.fixture(scope="module", params=[9, 10], ids=["capability9", "capability10"])
def results(request, tmp_path_factory):
    """Each check's traceback, on both ranks."""
    return launch.results_of(WORKER, 2, tmp_path_factory.mktemp("quantizers"), 100, [request.param], te=True)


@pytest.mark.parametrize("check", CHECKS)
def test_te_quantizer(results, check):
    assert [rank[check] for rank in results] == ["", ""]
