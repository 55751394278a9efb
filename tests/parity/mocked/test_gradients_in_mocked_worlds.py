"""Every parameter's gradient and every logged loss: ours against stock, with 8, 16 and 64 expert-parallel ranks."""

import json
from pathlib import Path

import pytest

from tests.gradient_deviations import TOLERANCE
from tests.parity.mocked.mock_gradients_worker import NODES, WORLDS, cases, dedup_cases, hop_cases
from tests.ranks import launch

pytestmark = pytest.mark.timeout(420)

WORKER = Path(__file__).with_name("mock_gradients_worker.py")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mocked-gradients")
    launch.check(launch.run(WORKER, [folder / "result.json"], 1, folder, timeout_s=400))
    return json.loads((folder / "result.json").read_text())


@pytest.mark.parametrize(
    "case",
    [
        *(name for num_ranks in WORLDS for name in (*cases(num_ranks), *dedup_cases(num_ranks))),
        *(name for num_ranks in NODES for name in hop_cases(num_ranks)),
    ],
)
def test_gradients_equal_stock(results, case, check_gradients):
    found = results[case]
    assert found["zero_gradients"] == []
    # As on real ranks: with one chunk the order of all sums is stock's.
    bound = 0.0 if case.endswith("/k=1") else TOLERANCE
    check_gradients(found["gradients"], bound)
    assert found["loss"] <= bound
    assert found["logged"] <= bound
    assert found["logged_names_equal"]
    assert found["expert_bias_counts_equal"]
    assert found["reports"] == dict.fromkeys(found["parameters"], 1)
    messages = {op.rsplit(".", 1)[1] for op in found["collectives"] if ".I." in op}
    hops = {"node_dispatch", "local_dispatch", "local_combine", "node_combine"}
    assert messages == (hops if "/two-hop/" in case else {"dispatch", "combine"})


@pytest.mark.parametrize("num_ranks", WORLDS)
def test_gradient_comparison_detects_a_naive_aux_loss(results, num_ranks):
    found = results[f"ep={num_ranks}/naive-aux-loss"]
    assert found["gradients"]["decoder.layers.1.mlp.router.weight"] > 100 * TOLERANCE


@pytest.mark.parametrize("num_ranks", WORLDS)
def test_stock_without_loopback_counts_is_refused(results, num_ranks):
    assert "receive splits must equal send splits" in results[f"ep={num_ranks}/stock-counts"]
