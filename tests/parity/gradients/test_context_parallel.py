"""Context parallelism without Transformer Engine: against stock on whole sequences, and with the overlap on top."""

from pathlib import Path

import pytest

from tests.gradient_deviations import TOLERANCE
from tests.parity.gradients.context_worker import MODELS, OVERLAPS
from tests.parity.gradients.variants import precision_of
from tests.ranks import launch

pytestmark = pytest.mark.distributed

WORKER = Path(__file__).with_name("context_worker.py")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Per rank: how far each case is from what it is compared with."""
    return launch.results_of(WORKER, 2, tmp_path_factory.mktemp("context"), timeout_s=150)


@pytest.mark.parametrize("model", MODELS)
def test_gradients_of_sequence_slices_equal_those_of_whole_sequences(results, model, check_gradients):
    for rank, result in enumerate(results):
        found = result[f"{model}/stock"]
        check_gradients(found["gradients"], TOLERANCE, f"rank {rank}")
        assert found["loss"] <= TOLERANCE


def test_gradient_comparison_detects_wrong_positions(results):
    for result in results:
        assert max(result["contiguous-slices"]["gradients"].values()) > 1e4 * TOLERANCE


@pytest.mark.parametrize("case", OVERLAPS)
def test_gradients_with_overlap_equal_those_without(results, case, check_gradients):
    bound = 0.0 if case.endswith("/k=1") else TOLERANCE
    for rank, result in enumerate(results):
        found = result[case]
        assert found["zero_gradients"] == []
        check_gradients(found["gradients"], bound, f"rank {rank}", precision_of(case))
        assert found["loss"] <= bound
        assert found["logged"] <= bound
        assert found["logged_names_equal"]
        assert found["expert_bias_counts_equal"]
        assert found["reports"] == dict.fromkeys(found["parameters"], 1)


@pytest.mark.parametrize("case", OVERLAPS)
def test_order_of_collectives_is_the_same_on_all_ranks(results, case):
    first, second = (result[case]["collectives"] for result in results)
    assert first == second
    assert {"_gather_along_first_dim", "_reduce_scatter_along_first_dim"} <= set(first)


def test_order_of_collectives_does_not_depend_on_the_wire(results):
    assert results[0]["erratic-wire/k=2"]["collectives"] == results[0]["plain/k=2"]["collectives"]


def test_keys_and_values_are_gathered_during_another_chunks_all_to_all(results):
    order = results[0]["plain/k=2"]["collectives"]
    leaves = order.index("L1.c0.F.dispatch")
    assert "_gather_along_first_dim" in order[leaves : order.index("L1.c0.F.combine")]
