"""Gradients of Transformer Engine's layers, ours against stock on the same weights: EP=2 on two ranks, on a CPU.

Transformer Engine's Python is its own; its kernels are plain torch here, see ``tests/te_cpu``.
"""

from pathlib import Path

import pytest

from tests.gradient_deviations import TOLERANCE
from tests.parity.gradients.variants import precision_of
from tests.parity.te.variants import GUARDED, MOST_ROWS, PAIRED, PLACED, cases
from tests.ranks import launch

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1220)]

WORKER = Path(__file__).with_name("worker.py")
CASES = [*cases(), "mtp-repeated-fused/k=2", *PLACED]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Per rank: what the worker found for each case."""
    return launch.results_of(WORKER, 2, tmp_path_factory.mktemp("te"), timeout_s=1200, te=True)


def idle_parameters(case: str, rank: int, names: list[str]) -> list[str]:
    """Parameters of the experts that the case leaves without a token: only they have no gradient."""
    idle = {"idle-expert": [2], "idle-rank": [2, 3], "all-to-one-expert": [0, 1, 2]}.get(case.split("/")[0], [])
    local = [f".experts.linear_fc{layer}.weight{expert - 2 * rank}" for expert in idle for layer in (1, 2)]
    return [name for name in names if name.endswith(tuple(local))]


@pytest.mark.parametrize("case", CASES)
def test_te_gradients_equal_stock(results, case, check_gradients):
    for rank, result in enumerate(results):
        found = result[case]
        assert found["zero_gradients"] == idle_parameters(case, rank, found["parameters"])
        # A gated shared expert uses its input twice, see test_gradients_equal_stock.
        bitwise = "k=1" in case.split("/") and not case.startswith("shared-expert-gate")
        bound = 0.0 if bitwise else TOLERANCE
        check_gradients(found["gradients"], bound, f"rank {rank}", precision_of(case))
        assert found["loss"] <= bound
        assert found["logged"] <= bound
        assert found["logged_names_equal"]
        assert found["expert_bias_counts_equal"]
        assert found["state_keys_equal"]


@pytest.mark.parametrize("case", PAIRED)
def test_te_gradients_of_paired_plans_equal_stock(results, case, check_gradients):
    bound = 0.0 if PAIRED[case].is_exact else TOLERANCE
    first, second = results
    assert first[case]["collectives"] == second[case]["collectives"]
    for rank, result in enumerate(results):
        found = result[case]
        check_gradients(found["gradients"], bound, f"rank {rank}", precision_of(case))
        assert found["losses_equal"] or bound
        assert found["loss"] <= bound
        assert found["logged"] <= bound
        assert found["logged_names_equal"]
        assert found["buffers_equal"]
        assert found["reports"] == dict.fromkeys(found["parameters"], 1)


@pytest.mark.parametrize("case", GUARDED)
def test_te_gradients_of_chunks_in_rounds_equal_stock(results, case, check_gradients):
    """With fp8, scales see the rows of all rounds; a weight's gradient is a sum over rounds, each rounded to bf16.

    On some processors, a GEMM over the rows of a round sums in a different order than a GEMM over all rows.
    """
    first, second = results
    assert first[case]["collectives"] == second[case]["collectives"]
    for rank, result in enumerate(results):
        found = result[case]
        of_experts = {name: error for name, error in found["gradients"].items() if ".experts." in name}
        check_gradients(of_experts, 2**-8 if "bf16" in case else TOLERANCE, f"rank {rank}", precision_of(case))
        others = {name: error for name, error in found["gradients"].items() if name not in of_experts}
        check_gradients(others, TOLERANCE, f"rank {rank}", precision_of(case))
        assert found["loss"] <= TOLERANCE
        assert found["reports"] == dict.fromkeys(found["parameters"], 1)
        assert found["peak_expert_rows"] <= MOST_ROWS
        assert found["num_split_chunks"] == found["num_chunks"] > 0


@pytest.mark.parametrize("case", CASES)
def test_te_parameters_are_reported_ready_once(results, case):
    for result in results:
        found = result[case]
        assert found["reports"] == dict.fromkeys(found["parameters"], 1)
        defers_nothing = case.endswith("/none") or case == "segments/dense-between"
        assert set(found["reports_of_deferred"]) == (set() if defers_nothing else {3})  # a step of one, one of two


def test_te_order_of_collectives_is_the_same_on_all_ranks(results):
    first, second = results
    for case in CASES:
        assert first[case]["collectives"] == second[case]["collectives"], case
        assert any(".I.dispatch" in op for op in first[case]["collectives"]), case


def test_te_grouped_experts_at_other_places_keep_their_numbers_in_checkpoints(results):
    for result in results:
        assert all(stored == expert for stored, expert in result["placed/numbers"])
        # Of each of two experts in each of three layers: both halves of the gated layer, the other one, two states.
        assert len(result["placed/numbers"]) == 3 * 2 * 5
    assert {stored for stored, _ in results[0]["placed/numbers"]} != {0, 1}


def test_te_deferred_weight_grads_wait_for_gaps_within_their_bound(results):
    for result in results:
        assert result["fused/k=2"]["peak_dw_bytes"] > 20_000
        assert 0 < result["dw-memory-20000/k=2"]["peak_dw_bytes"] <= 20_000
        assert result["dw-memory-1/k=2"]["peak_dw_bytes"] == result["dw-at-once"]["peak_dw_bytes"] == 0


def test_stock_loses_gradients_of_a_repeated_mtp_layer_with_fused_weight_grads(results):
    """So ours are compared with those of stock without fusion, see docs/support.md."""
    for result in results:
        found = result["mtp-repeated-fused/stock"]["gradients"]
        assert found["mtp.layers.0.mtp_model_layer.mlp.experts.linear_fc1.weight0"] > 0.1
        assert found["decoder.layers.1.self_attention.linear_qkv.weight"] <= TOLERANCE


def test_gradient_comparison_detects_a_first_call_that_overwrites(results):
    """The same plan without our forward: the first chunk's dW overwrites those of the others."""
    for result in results:
        found = result["first-call/damaged"]["gradients"]
        assert max(found.values()) > 0.1
        assert found["decoder.layers.1.self_attention.linear_qkv.weight"] > 0.1


def test_gradient_comparison_detects_a_weight_grad_that_counts_twice(results):
    """The same plan with ``.grad`` added: the buffers of a grouped linear hold the dW that was added already."""
    for result in results:
        found = result["dw-at-once/damaged"]["gradients"]
        assert found["decoder.layers.1.mlp.experts.linear_fc1.weight0"] > 0.1
        assert found["decoder.layers.1.self_attention.linear_qkv.weight"] <= TOLERANCE
