"""Every gradient and the order of collectives with tensor, context and expert tensor parallelism: against stock."""

from pathlib import Path

import pytest

from tests.gradient_deviations import TOLERANCE
from tests.parity.gradients.layouts_worker import CASES, CHANGES_SUMS, DEDUP_CASES
from tests.parity.gradients.variants import precision_of
from tests.ranks import launch

pytestmark = pytest.mark.distributed

WORKER = Path(__file__).with_name("layouts_worker.py")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Per rank: what the worker found for each layout."""
    return launch.results_of(WORKER, 4, tmp_path_factory.mktemp("layouts"), timeout_s=230)


@pytest.mark.parametrize("case", [*CASES, *DEDUP_CASES])
def test_gradients_equal_stock(results, case, check_gradients):
    bound = 0.0 if case.endswith("/k=1") and case not in CHANGES_SUMS else TOLERANCE
    for rank, result in enumerate(results):
        found = result[case]
        assert found["zero_gradients"] == []
        check_gradients(found["gradients"], bound, f"rank {rank}", precision_of(case))
        assert found["loss"] <= bound
        assert found["logged"] <= bound
        assert found["logged_names_equal"]
        assert found["reports"] == dict.fromkeys(found["parameters"], 1)


@pytest.mark.parametrize("case", [*CASES, *DEDUP_CASES])
def test_order_of_collectives_is_the_same_on_all_ranks(results, case):
    collectives = [result[case]["collectives"] for result in results]
    assert all(order == collectives[0] for order in collectives)
    assert any(".I.dispatch" in op for op in collectives[0])


def test_order_of_collectives_does_not_depend_on_the_wire(results):
    plain = results[0]["EP2xETP2/k=2"]["collectives"]
    assert results[0]["EP2xETP2/erratic-wire/k=2"]["collectives"] == plain
    assert {"all_gather_into_tensor", "_reduce_scatter_along_first_dim"} <= set(plain)


@pytest.mark.parametrize("case", ["EP2xTP2/k=1", "EP2xETP2/k=1"])
def test_weight_gradients_of_tensor_parallel_layers_are_deferred(results, case):
    """In each of three layers attention's two and two experts' two, and the output layer."""
    assert len(results[0][case]["reports_of_deferred"]) == 3 * (2 + 2 * 2) + 1


def test_all_to_alls_of_two_chunks_overlap(results):
    """While one chunk's rows are on their way through the experts, the other's leave: forward and backward."""
    collectives = results[0]["EP4/erratic-wire/k=2"]["collectives"]
    # The mirrored pipeline starts with the last chunk, and with the combine.
    for leaves, other_leaves, returns in (
        ("c0.F.dispatch", "c1.F.dispatch", "c0.F.combine"),
        ("c1.I.combine", "c0.I.combine", "c1.I.dispatch"),
    ):
        order = [op.removeprefix("L2.") for op in collectives if op.startswith("L2.")]
        start = order.index(leaves)
        assert start < order.index(other_leaves, start) < order.index(returns, start)
