"""Recompute and fused permutation that Megatron offers for Transformer Engine's layers: ours against stock, EP=2."""

import pytest

from tests.gradient_deviations import TOLERANCE
from tests.parity.te.recompute_and_permutation_worker import CASES, MEMORY_CASES, all_results
from tests.ranks import launch

# All cases run in one start of the ranks: 30 seconds on two idle cores.
pytestmark = [pytest.mark.distributed, pytest.mark.timeout(620)]


results = launch.results(all_results, 2, timeout_s=600, te=launch.Te(interprets_triton=True))
"""Per rank: what is found for each case."""


@pytest.mark.parametrize("case", CASES)
def test_gradients_with_te_recompute_equal_stock(results, case, check_gradients):
    check_gradients.equal_stock(results, case, 0.0 if "/k=1" in case else TOLERANCE)
    assert all(result[case]["zero_gradients"] == [] for result in results)


def test_stocks_checkpoints_would_report_once_per_chunk(results):
    """Each of its backward passes inside the backward pass reports what was recomputed."""
    for result in results:
        reports = result["stock's checkpoints"]["reports"]
        twice = {name.partition("layers.")[2][2:] for name, number in reports.items() if number == 2}
        assert twice == {f"self_attention.linear_{part}_up_proj.weight" for part in ("q", "kv")} | {
            "input_layernorm.weight"
        }


@pytest.mark.parametrize("case", MEMORY_CASES)
def test_recomputed_outputs_are_not_kept(results, case):
    dropped = {"router", "linear_fc2"} | ({"core_attention"} if "latent" in case else set())
    for result in results:
        kept = result[f"memory/{case}"]
        assert {name for name, num_bytes in kept["ours"].items() if num_bytes == 0} == dropped
        assert kept["ours"] == kept["stock"]
        assert all(kept["ours without recompute"].values())


@pytest.mark.parametrize(
    ("case", "calls"),
    [  # chunks x layers with experts x micro-batches of both steps
        ("fused-permutation/bf16/k=1", 1 * 2 * 3),
        ("fused-permutation/k=3", 3 * 1 * 3),
        ("fused-permutation/k=3/experts", 3 * 2 * 3),
        ("fused-permutation/interpreted/k=2", 2 * 1 * 2),
    ],
)
def test_fused_permutation_runs_in_every_chunk(results, case, calls):
    for result in results:
        assert set(result[case]["kernels"].values()) == {calls}
