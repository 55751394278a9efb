"""Packed documents in the overlapping layers against stock with a mask of documents: losses and every gradient."""

import pytest

from tests.gradient_deviations import TOLERANCE
from tests.parity.documents.cases import CASES
from tests.parity.documents.documents_worker import all_results
from tests.ranks import launch

pytestmark = pytest.mark.distributed

NAMES = [f"{layout}/{name}" for layout, cases in CASES.items() for name in cases]


results = launch.results(all_results, 2, timeout_s=240)
"""Per rank: what is found for each case."""


@pytest.mark.parametrize("name", NAMES)
def test_gradients_equal_stock_with_a_mask_of_documents(results, name, check_gradients):
    for rank, result in enumerate(results):
        found = result[name]
        assert found["zero_gradients"] == []
        # Stock sums a row of scores over all positions, masked ones included, and the kernel over a document's.
        check_gradients(found["gradients"], TOLERANCE, f"rank {rank}")
        assert found["loss"] <= TOLERANCE
        assert found["logged"] <= TOLERANCE
        assert found["logged_names_equal"]


@pytest.mark.parametrize("name", NAMES)
def test_losses_of_an_evaluation_equal_stock(results, name):
    assert all(result[name]["evaluation"] <= TOLERANCE for result in results)


@pytest.mark.parametrize("name", ["one-document/plain/k=1", "one-document/llama-like/k=2/sequence"])
def test_samples_of_one_document_equal_plain_samples(results, name):
    for result in results:
        found = result[name]
        assert (found["loss"], found["evaluation"], found["logged"]) == (0.0, 0.0, 0.0)
        assert set(found["gradients"].values()) == {0.0}


@pytest.mark.parametrize("name", ["without-documents", "positions-of-chunks", "predictions-across-documents"])
def test_comparison_detects(results, name):
    assert all(max(result[name]["gradients"].values()) > 1e3 * TOLERANCE for result in results)
