"""Gradients of Transformer Engine's layers, ours against stock on the same weights: EP=2 on two ranks, on a CPU.

Transformer Engine's Python is its own; its kernels are plain torch here, see ``tests/te_cpu``.
"""

from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest

from megatron_lancet.patching import replaced
from megatron_lancet.schedule.plan import ChunkDim, fixed_plan
from tests.gradient_deviations import TOLERANCE, precision_of
from tests.parity.gradients.connections import parallel
from tests.parity.gradients.disturbances import erratic_wire
from tests.parity.gradients.gradients_worker import build, compare_case, compare_plan, overlapping_model
from tests.parity.gradients.placed import numbers_in_checkpoints, place
from tests.parity.gradients.variants import VARIANTS
from tests.parity.paired.paired_worker import compare
from tests.parity.te.variants import FURTHER, FUSED, GUARDED, HAZARDS, MOST_ROWS, PAIRED, PLACED, TE, cases
from tests.ranks import launch

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1220)]


def first_call_of_a_step(stack: ExitStack) -> None:
    """Negative control: Transformer Engine's own forward, whose first dW of a step overwrites the gradient."""
    from megatron_lancet.features.te.linear import TELinearPerChunk

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return super(TELinearPerChunk, self).forward(*args, **kwargs)

    stack.enter_context(replaced(TELinearPerChunk, "forward", forward))


def grad_from_autograd_counts(stack: ExitStack) -> None:
    """Negative control: a grouped linear hands autograd its buffers, and what autograd finds in ``.grad`` is added."""
    from megatron_lancet.features.te import linear
    from megatron_lancet.runtime.weight_grad_store import DeferredWeight

    stack.enter_context(replaced(linear._WeightWithPlaceholder, "report", DeferredWeight.report))
    stack.enter_context(replaced(linear.TELinearPerChunk, "_outputs_of_dw", lambda _, outputs: lambda: outputs))


def all_results() -> dict[str, Any]:
    """What is found for each case, by its name."""
    with parallel({"expert_model_parallel_size": 2}):
        return results_on_two_ranks()


def selections_of_attention() -> int:
    """How often Transformer Engine selects a backend of attention in two steps of two sequence chunks."""
    from transformer_engine.pytorch.attention.dot_product_attention import utils

    with mock.patch.object(utils, "get_attention_backend", wraps=utils.get_attention_backend) as select:
        compare_plan(TE, fixed_plan(2, chunk_dim=ChunkDim.SEQUENCE))
    return select.call_count


def further_results() -> dict[str, Any]:
    """What is found for the cases that only run at night."""
    with parallel({"expert_model_parallel_size": 2}):
        return {name: compare_plan({**TE, **cases()[name][0]}, cases()[name][1]) for name in FURTHER}


def results_on_two_ranks() -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, (overrides, plan) in cases().items():
        if name not in FURTHER:
            results[name] = compare_plan({**TE, **overrides}, plan, erratic_wire if "dw-memory" in name else None)
    repeated = {**TE, **VARIANTS["mtp-repeated"]}
    results["mtp-repeated-fused/k=2"] = compare_plan({**repeated, **FUSED}, fixed_plan(2), against=repeated)
    results["mtp-repeated-fused/stock"] = compare_plan({**repeated, **FUSED}, fixed_plan(2))
    for name, disturb in {"first-call": first_call_of_a_step, "dw-at-once": grad_from_autograd_counts}.items():
        overrides, plan = HAZARDS[name]
        results[f"{name}/damaged"] = compare_plan({**TE, **overrides}, plan, disturb)
    for name, placed in PLACED.items():
        results[name] = compare_case(placed)
    results["selections"] = selections_of_attention()
    model, *_ = build(PLACED["placed/grouped/k=1"].overrides)
    overlapping_model(model, fixed_plan(1))
    place(model, moves_weights=True)
    results["placed/numbers"] = numbers_in_checkpoints(model)
    for name, (overrides, plan) in GUARDED.items():
        results[name] = compare_plan({**TE, **overrides}, plan, max_rows=MOST_ROWS)
    return results | {name: compare(case) for name, case in PAIRED.items()}


CASES = [*(name for name in cases() if name not in FURTHER), "mtp-repeated-fused/k=2", *PLACED]


results = launch.results(all_results, 2, timeout_s=1200, te=launch.Te())
"""Per rank: what is found for each case."""
further = launch.results(further_results, 2, timeout_s=1200, te=launch.Te())


def idle_parameters(case: str, rank: int, names: list[str]) -> list[str]:
    """Parameters of the experts that the case leaves without a token: only they have no gradient."""
    idle = {"idle-expert": [2], "idle-rank": [2, 3], "all-to-one-expert": [0, 1, 2]}.get(case.split("/")[0], [])
    local = [f".experts.linear_fc{layer}.weight{expert - 2 * rank}" for expert in idle for layer in (1, 2)]
    return [name for name in names if name.endswith(tuple(local))]


@pytest.mark.parametrize("case", CASES)
def test_te_gradients_equal_stock(results, case, check_gradients):
    check_case(results, case, check_gradients)


@pytest.mark.nightly
@pytest.mark.parametrize("case", sorted(FURTHER))
def test_te_gradients_of_further_cases_equal_stock(further, case, check_gradients):
    check_case(further, case, check_gradients)


def check_case(results, case, check_gradients):
    # A gated shared expert uses its input twice, see test_gradients_equal_stock.
    bitwise = "k=1" in case.split("/") and not case.startswith("shared-expert-gate")
    check_gradients.equal_stock(results, case, 0.0 if bitwise else TOLERANCE)
    for rank, result in enumerate(results):
        found = result[case]
        assert found["zero_gradients"] == idle_parameters(case, rank, found["parameters"])
        assert found["expert_bias_counts_equal"]
        assert found["state_keys_equal"]
        defers_nothing = case.endswith("/none") or case == "segments/dense-between"
        assert set(found["reports_of_deferred"]) == (set() if defers_nothing else {3})  # a step of one, one of two


@pytest.mark.parametrize("case", PAIRED)
def test_te_gradients_of_paired_plans_equal_stock(results, case, check_gradients):
    bound = 0.0 if PAIRED[case].is_exact else TOLERANCE
    first, second = results
    assert first[case]["collectives"] == second[case]["collectives"]
    check_gradients.equal_stock(results, case, bound)
    for result in results:
        assert result[case]["losses_equal"] or bound
        assert result[case]["buffers_equal"]


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


def test_te_order_of_collectives_is_the_same_on_all_ranks(results):
    first, second = results
    for case in CASES:
        assert first[case]["collectives"] == second[case]["collectives"], case
        assert any(".I.dispatch" in op for op in first[case]["collectives"]), case


def test_te_selects_attention_once_for_each_length(results):
    """Of two lengths in each of two layers; not in each of the 12 calls."""
    for result in results:
        assert 0 < result["selections"] <= 2 * 2


def test_te_placed_experts_keep_numbers_in_checkpoints(results):
    for result in results:
        assert all(stored == expert for stored, expert in result["placed/numbers"])
        # Of each of two experts in each of three layers: both halves of the gated layer, the other one, two states.
        assert len(result["placed/numbers"]) == 3 * 2 * 5
    assert {stored for stored, _ in results[0]["placed/numbers"]} != {0, 1}


def test_te_deferred_weight_grads_keep_their_bound(results):
    for result in results:
        assert result["fused/k=2"]["peak_dw_bytes"] > 20_000
        assert 0 < result["dw-memory-20000/k=2"]["peak_dw_bytes"] <= 20_000
        assert result["dw-memory-1/k=2"]["peak_dw_bytes"] == result["dw-at-once"]["peak_dw_bytes"] == 0


def test_stock_loses_gradients_of_a_repeated_mtp_layer(results):
    """So ours are compared with stock's without fusion, see docs/support.md."""
    for result in results:
        found = result["mtp-repeated-fused/stock"]["gradients"]
        assert found["mtp.layers.0.mtp_model_layer.mlp.experts.linear_fc1.weight0"] > 0.1
        assert found["decoder.layers.1.self_attention.linear_qkv.weight"] <= TOLERANCE


def test_comparison_detects_a_first_call_that_overwrites(results):
    """The same plan without our forward: the first chunk's dW overwrites those of the others."""
    for result in results:
        found = result["first-call/damaged"]["gradients"]
        assert max(found.values()) > 0.1
        assert found["decoder.layers.1.self_attention.linear_qkv.weight"] > 0.1


def test_comparison_detects_a_weight_grad_that_counts_twice(results):
    """The same plan with ``.grad`` added: the buffers of a grouped linear hold the dW that was added already."""
    for result in results:
        found = result["dw-at-once/damaged"]["gradients"]
        assert found["decoder.layers.1.mlp.experts.linear_fc1.weight0"] > 0.1
        assert found["decoder.layers.1.self_attention.linear_qkv.weight"] <= TOLERANCE
