"""Packed documents in Transformer Engine's layers against stock with the same documents."""

from pathlib import Path

import pytest

from tests.gradient_deviations import TOLERANCE
from tests.parity.documents.te_worker import CASES
from tests.ranks import launch

pytestmark = pytest.mark.distributed

WORKER = Path(__file__).with_name("te_worker.py")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Per rank: how far each case is from stock."""
    return launch.results_of(WORKER, 2, tmp_path_factory.mktemp("documents_te"), timeout_s=150, te=True)


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_equal_stock_with_the_same_documents(results, name, check_gradients):
    for rank, result in enumerate(results):
        found = result[name]
        assert found["zero_gradients"] == []
        check_gradients(found["gradients"], TOLERANCE, f"rank {rank}")
        assert max(found["loss"], found["evaluation"], found["logged"]) <= TOLERANCE
