"""Gradients of Transformer Engine's layers with tensor, context, data and expert tensor parallelism: against stock."""

from pathlib import Path

import pytest

from tests.gradient_deviations import TOLERANCE
from tests.parity.gradients.variants import precision_of
from tests.parity.te.layouts_worker import CASES, HOPS
from tests.ranks import launch

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(480)]

BF16_TOLERANCE = 2e-2
"""Chunks round other partial sums to bf16: a weight's gradient is a sum of those of two chunks."""
WORKER = Path(__file__).with_name("layouts_worker.py")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Per rank: what the worker found for each layout."""
    return launch.results_of(WORKER, 4, tmp_path_factory.mktemp("layouts"), timeout_s=460, te=True)


@pytest.mark.parametrize("case", [*CASES, *HOPS])
def test_te_gradients_equal_stock_in_layouts(results, case, check_gradients):
    chunked = BF16_TOLERANCE if precision_of(case) == "bf16" else TOLERANCE
    bound = 0.0 if case.endswith("/k=1") else chunked
    for rank, result in enumerate(results):
        found = result[case]
        assert found["zero_gradients"] == []
        check_gradients(found["gradients"], bound, f"rank {rank}", precision_of(case))
        assert found["loss"] <= bound
        assert found["logged"] <= bound
        assert found["reports"] == dict.fromkeys(found["parameters"], 1)
        assert set(found["reports_of_deferred"]) == {3}


@pytest.mark.parametrize("case", [*CASES, *HOPS])
def test_te_order_of_collectives_is_the_same_on_all_ranks(results, case):
    collectives = [result[case]["collectives"] for result in results]
    assert all(order == collectives[0] for order in collectives)
    assert any(f".I.{'node_' if case in HOPS else ''}dispatch" in op for op in collectives[0])
