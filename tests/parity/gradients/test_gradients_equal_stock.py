"""Every parameter's gradient, every logged loss and every report to DDP: ours against stock, EP=2 on two ranks."""

import math

import pytest

from benchmarks.gradient_error import worst
from megatron_lancet.schedule.plan import DwPolicy
from tests.features.dedup import cases as dedup
from tests.features.placement import cases as placement
from tests.features.row_bound import cases as row_bound
from tests.features.tiles import cases as tiles
from tests.gradient_deviations import TOLERANCE, precision_of
from tests.parity.gradients.disturbances import DAMAGED, DAMAGED_DEDUP, DAMAGED_GRADIENTS
from tests.parity.gradients.results_worker import all_results, further_results, rows
from tests.parity.gradients.variants import (
    DW_MEMORY_CASES,
    FURTHER,
    MICRO_BATCH_OF_ONE,
    SEGMENTED,
    WITH_GAPS,
)
from tests.ranks import launch

# All cases run in one start of the ranks: about two minutes on two idle cores, four where others run next to it.
pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1220)]

BF16_AGAINST_FP32 = "bf16 against fp32"


results = launch.results(all_results, 2, timeout_s=1200)
"""Per rank: what is found for each case."""
further = launch.results(further_results, 2, timeout_s=1200)


def exact_cases() -> list[str]:
    others = ["bf16/k=1", "dw-none/k=2", "erratic-wire/k=2"]
    others += [*SEGMENTED, *DW_MEMORY_CASES, *WITH_GAPS, *dedup.CASES, *placement.CASES, *tiles.CASES]
    return [*(name for name in rows() if name not in FURTHER), *MICRO_BATCH_OF_ONE, *others]


def idle_parameters(case: str, rank: int, names: list[str]) -> list[str]:
    """Parameters of the experts that the case leaves without a token: only they have no gradient."""
    idle = {"idle-expert": [2], "idle-rank": [2, 3], "all-to-one-expert": [0, 1, 2]}.get(case.split("/")[0], [])
    local = [f".local_experts.{expert - 2 * rank}." for expert in idle]
    return [name for name in names if any(part in name for part in local)]


@pytest.mark.parametrize("case", exact_cases())
def test_gradients_equal_stock(results, case, check_gradients):
    check_case(results, case, check_gradients)


@pytest.mark.nightly
@pytest.mark.parametrize("case", sorted(FURTHER))
def test_gradients_of_further_rows_equal_stock(further, case, check_gradients):
    check_case(further, case, check_gradients)
    assert further[0][case]["collectives"] == further[1][case]["collectives"]


def check_case(results, case, check_gradients):
    """DDP counts reports in the last micro-batch of a step; the other one only accumulates."""
    # A gated shared expert uses its input twice. Its two gradients are added to each other before they are added to
    # those of the router and the permutation; in stock one after the other.
    bitwise = "/k=1" in case and not case.startswith("shared-expert-gate")
    own = dedup.CASES | tiles.CASES
    bitwise = own[case].is_exact if case in own else bitwise
    check_gradients.equal_stock(results, case, 0.0 if bitwise else TOLERANCE)
    for rank, result in enumerate(results):
        found = result[case]
        assert found["zero_gradients"] == idle_parameters(case, rank, found["parameters"])
        assert found["expert_bias_counts_equal"]
        assert found["state_keys_equal"]
        # A step of one micro-batch and one of two.
        defers_nothing = case in ("dw-none/k=2", "segments/dense-between")
        assert set(found["reports_of_deferred"]) == (set() if defers_nothing else {3})


@pytest.mark.parametrize("case", exact_cases())
def test_order_of_collectives_is_the_same_on_all_ranks(results, case):
    first, second = (result[case]["collectives"] for result in results)
    assert first == second
    assert any(op.startswith("reduce") for op in first)
    assert any(".I.dispatch" in op for op in first)


def test_order_of_collectives_does_not_depend_on_the_wire(results):
    """With transfers that seem to end at random, differently on each rank, other dWs run in other gaps."""
    assert results[0]["erratic-wire/k=2"]["collectives"] == results[0]["plain/k=2"]["collectives"]


def test_order_of_collectives_does_not_depend_on_planned_gaps(results):
    """They choose which dW runs where; each rank's wire decides how many of them do."""
    for result in results:
        assert result["gaps/k=2"]["collectives"] == result["plain/k=2"]["collectives"]


@pytest.mark.parametrize("case", ["plain/k=1", "group-limited/k=1", "mla/k=1", "frozen-half-of-the-linears/k=1"])
def test_dedup_sends_the_same_messages_with_fewer_rows(results, case):
    """Both experts of a group-limited token are on one rank: it goes there once, with a row of the same width."""
    for result in results:
        ours, plain = result[f"{case}/dedup"], result[case]
        assert ours["collectives"] == plain["collectives"]
        if case.startswith("group-limited"):
            assert 0 < ours["payload_bytes"] * 2 == plain["payload_bytes"]
        else:
            assert 0 < ours["payload_bytes"] < plain["payload_bytes"]


def test_padded_experts_send_counts_of_chunks_only(results):
    def messages(case: str) -> set[str]:
        return {op.split(".")[-1] for op in results[0][case]["collectives"] if ".F." in op}

    assert messages("capacity-padded/k=1/experts") == {"dispatch", "combine"}
    assert messages("capacity-padded/k=3/experts") == {"counts", "dispatch", "combine"}
    assert messages("capacity-probs/k=1/experts") == {"counts", "dispatch", "combine"}


def test_segments_run_in_their_own_chunks(results):
    def chunks(case: str) -> dict[int, set[int]]:
        forward = [op.split(".") for op in results[0][case]["collectives"] if op.endswith(".F.dispatch")]
        return {layer: {int(c[1:]) for at, c, *_ in forward if at == f"L{layer}"} for layer in (1, 2, 3)}

    assert chunks("segments/batch-then-sequence") == {1: {0, 1}, 2: {0, 1, 2}, 3: {0, 1, 2}}
    assert chunks("segments/whole-then-gate") == {1: {0}, 2: {0, 1, 2, 3}, 3: {0, 1, 2, 3}}
    assert chunks("segments/dense-between") == {1: {0, 1, 2}, 2: set(), 3: {0, 1}}


def test_dw_memory_bound_is_kept_and_moves_no_collective(results):
    """Also where ranks run different dWs early: their wires are erratic."""
    for result in results:
        free = result["plain/k=2"]
        assert free["dw_ran_early"] == 0
        assert free["peak_dw_bytes"] > 20_000
        assert 0 < result["dw-memory-20000/k=2"]["peak_dw_bytes"] <= 20_000
        assert result["dw-memory-1/k=2"]["peak_dw_bytes"] == 0
        for case in ("dw-memory-1/k=2", "dw-memory-20000/k=2"):
            assert result[case]["dw_ran_early"] > 0
            assert result[case]["collectives"] == free["collectives"]


def test_experts_are_grouped_unless_a_setting_prevents_it(results):
    apart = {"one-expert-per-rank", "bias", "frozen-half-of-the-linears", "dw-none", "dense-between", "k=1"}
    for result in results:
        for case in exact_cases():
            assert (result[case]["grouped_layers"] > 0) == apart.isdisjoint(case.split("/")), case


def test_frozen_weights_are_not_reported(results):
    for result in results:
        reported = result["frozen-router-embedding-output/k=3"]["parameters"]
        assert len(reported) < len(result["plain/k=2"]["parameters"])
        assert not any("router" in name for name in reported)


def test_gradient_reductions_start_before_the_backward_pass_ends(results):
    collectives = results[0]["plain/k=2"]["collectives"]
    last_all_to_all = max(i for i, op in enumerate(collectives) if ".I." in op)
    assert any(op.startswith("reduce") for op in collectives[:last_all_to_all])


def test_bf16_gradients_are_as_close_to_fp32_as_stock(results, check_gradients):
    """Chunks round other partial sums to bf16, so gradients differ in the last bits; their errors must not grow."""
    for rank, result in enumerate(results):
        assert result["bf16-errors"]
        for name, (stock_error, our_error) in result["bf16-errors"].items():
            assert math.isfinite(stock_error)
            check_gradients({name: our_error}, 1.5 * stock_error + 1e-3, f"rank {rank}", BF16_AGAINST_FP32)


def test_gradient_comparison_detects_a_naive_aux_loss(results):
    found = results[0]["naive-aux-loss/k=2"]
    assert found["gradients"]["decoder.layers.1.mlp.router.weight"] > 100 * TOLERANCE
    assert found["logged"] > 100 * TOLERANCE


def test_gradient_comparison_detects_padding_that_routers_count(results):
    found = results[0]["padding-counted/k=2"]
    assert found["gradients"]["decoder.layers.1.mlp.router.weight"] > 100 * TOLERANCE
    assert found["logged"] > 100 * TOLERANCE


def test_comparison_detects_mtp_dws_added_in_another_order(results):
    assert 0 < max(results[0]["uses-added-one-by-one/k=1"]["gradients"].values()) <= TOLERANCE


@pytest.mark.parametrize("damage", tiles.DAMAGED)
def test_gradient_comparison_detects_damaged_tiles(results, damage):
    for result in results:
        assert max(result[damage]["gradients"].values()) > 1e4 * TOLERANCE


def test_comparison_detects_dws_that_sum_rows_by_part(results):
    """Another order of sums: seen to the bit, and only there."""
    largest = [max(result["tiles/rows-by-part"]["gradients"].values()) for result in results]
    assert 0 < max(largest) <= TOLERANCE


def test_rows_that_stay_are_in_no_message(results):
    """Each tile is a message of its own, forward and backward; all of them together have the same rows."""
    for result in results:
        plain, found = result["plain/k=1"], result["tiles-4-after/k=1"]
        assert found["payload_bytes"] == plain["payload_bytes"] > 0
        tiles = [op.split(".")[2] for op in found["collectives"] if op.startswith("L1.c0.t") and ".I.combine" in op]
        assert tiles == ["t3", "t2", "t1", "t0"] * (len(tiles) // 4) != []


@pytest.mark.parametrize("damage", DAMAGED_DEDUP)
def test_comparison_detects_a_damaged_dedup(results, damage):
    for result in results:
        assert max(result[damage]["gradients"].values()) > 1e4 * TOLERANCE


def test_comparison_detects_experts_without_their_weights(results):
    for result in results:
        assert max(result["placed/unmoved"]["gradients"].values()) > 1e4 * TOLERANCE
        assert result["placed/unmoved"]["loss"] > 100 * TOLERANCE


def test_comparison_detects_an_mtp_layer_with_other_tokens(results):
    found = results[0]["same-prediction-twice/k=2"]
    assert found["gradients"]["mtp.layers.1.eh_proj.weight"] > 1e4 * TOLERANCE
    assert found["logged"] > 100 * TOLERANCE


def test_gradient_comparison_detects_a_lost_weight_grad(results):
    assert max(results[0]["lost-weight-grad/k=2"]["gradients"].values()) > 1e4 * TOLERANCE


def test_comparison_detects_hybrid_layers_without_a_gradient(results):
    assert max(results[0]["detached-experts/k=2"]["gradients"].values()) > 1e4 * TOLERANCE


@pytest.mark.parametrize("damage", DAMAGED_GRADIENTS)
def test_comparison_detects_a_damaged_gradient_of_step_2(results, damage):
    """Not a number, infinite, or of a parameter that only stock trains: nothing else deviates, and this is seen."""
    for result in results:
        found = dict(result[f"{damage}/k=2"]["gradients"])
        assert worst(found) == (DAMAGED, math.inf)
        assert found.pop(DAMAGED) == math.inf
        assert worst(found)[1] <= TOLERANCE


def test_lost_flush_stops_the_run_before_the_next_forward(results):
    for result in results:
        assert "ended without its flush" in result["lost-flush"]


@pytest.mark.parametrize("case", row_bound.CASES)
def test_gradients_of_chunks_in_rounds_equal_stock(results, case, check_gradients):
    guard = row_bound.CASES[case]
    assert results[0][case]["collectives"] == results[1][case]["collectives"]
    for rank, result in enumerate(results):
        found = result[case]
        assert found["zero_gradients"] == idle_parameters(case.removeprefix("guarded/"), rank, found["parameters"])
        # A weight's gradient is a sum over rounds, of which each is rounded to bf16.
        of_experts = {name: error for name, error in found["gradients"].items() if ".experts." in name}
        check_gradients(of_experts, 2**-8 if "bf16" in case else TOLERANCE, f"rank {rank}", precision_of(case))
        others = {name: error for name, error in found["gradients"].items() if name not in of_experts}
        # GEMMs of parts of the rows give the same bits, but for parts of one row.
        bound = 0.0 if case in (row_bound.HOT, "guarded/bf16/k=1") else TOLERANCE
        check_gradients(others, bound, f"rank {rank}", precision_of(case))
        assert found["loss"] <= bound
        assert found["logged"] <= bound
        assert found["expert_bias_counts_equal"]
        assert found["reports"] == dict.fromkeys(found["parameters"], 1)
        defers = guard.plan.dw_policy is DwPolicy.FILL
        assert set(found["reports_of_deferred"]) == ({3} if defers else set())
        assert found["peak_expert_rows"] <= guard.max_rows
        assert found["num_split_chunks"] <= found["num_chunks"]
        assert (found["num_split_chunks"] == found["num_chunks"]) == (case != row_bound.HALF)
        assert found["num_split_chunks"] > 0


@pytest.mark.parametrize(
    ("in_rounds", "in_one_message"),
    [
        ("guarded/plain/k=1", "plain/k=1"),
        ("guarded/bf16/k=1", "bf16/k=1"),
        ("guarded/plain/dedup/k=1", "plain/k=1/dedup"),
        (row_bound.HALF, "plain/k=2"),
        ("guarded/gaps/k=2", "gaps/k=2"),
    ],
)
def test_rounds_do_not_change_the_order_of_reductions(results, in_rounds, in_one_message):
    """Of an expert's replicas one may have its rows in rounds and another one in one message."""
    for result in results:
        ours, plain = (
            [op for op in result[case]["collectives"] if op.startswith("reduce")]
            for case in (in_rounds, in_one_message)
        )
        assert ours == plain != []


def test_all_rows_to_one_rank_are_as_many_at_a_time_as_may_be(results):
    hot = results[1][row_bound.HOT]
    assert hot["peak_expert_rows"] == row_bound.CASES[row_bound.HOT].max_rows == 16
    assert hot["most_rounds"] == 128 // 16


def test_a_rank_that_gets_all_rows_keeps_none_of_them(results):
    """Of three layers with 128 rows each, hidden and feed-forward size 32 and 64, in fp32; its own rows are 64."""
    rows_bytes = 3 * 128 * (32 + 2 * 64) * 4
    kept = results[1]["kept"]
    assert kept["unlimited"] - kept["limited"] > 0.8 * rows_bytes
    assert results[0]["kept"]["limited"] <= 1.05 * kept["limited"]


@pytest.mark.parametrize("damage", row_bound.DAMAGED)
def test_gradient_comparison_detects_damaged_rounds(results, damage):
    assert any(worst(result[damage]["gradients"])[1] > 1e4 * TOLERANCE for result in results)


def switching_cases() -> list[str]:
    from tests.parity.gradients.switching import CASES

    return list(CASES)


@pytest.mark.parametrize("case", switching_cases())
def test_switching_plans_changes_no_gradient(results, case, check_gradients):
    """Each step against stock on the same weights, which move on; plans of one chunk are stock's to the bit."""
    for result in results:
        for found in result[case]:
            bound = 0.0 if found["plan"].startswith("whole") else TOLERANCE
            check_gradients(found["gradients"], bound, found["plan"])
            assert found["loss"] <= bound, found["plan"]
            assert found["logged"] <= bound, found["plan"]


@pytest.mark.parametrize("case", switching_cases())
def test_switched_plans_run_their_own_chunks(results, case):
    from tests.parity.gradients.switching import CASES

    _, _, plans = CASES[case]
    first, second = (result[case] for result in results)
    for ours, theirs in zip(first, second, strict=True):
        assert ours["collectives"] == theirs["collectives"]
        tile = "t0." if "tiles" in ours["plan"] else ""
        assert ours["position"].startswith(f"past L1.c0.{tile}I.dispatch")
        chunks = {int(op.split(".")[1][1:]) for op in ours["collectives"] if op.endswith(".F.dispatch")}
        assert chunks == set(range(plans[ours["plan"]].num_chunks))
        assert (ours["grouped_layers"] > 0) == (not ours["plan"].startswith("whole"))
        assert (ours["num_deferred"] == 0) == ours["plan"].endswith("none")
    by_plan: dict[str, list[str]] = {}
    for ours in first[1:]:  # in DDP's first step reductions start at its end
        assert by_plan.setdefault(ours["plan"], ours["collectives"]) == ours["collectives"], ours["plan"]


@pytest.mark.parametrize("case", [case for case in switching_cases() if "overlap" in case])
def test_switched_plans_report_each_parameter_once(results, case):
    for result in results:
        for found in result[case]:
            assert found["reports"] == dict.fromkeys(found["gradients"], 1), found["plan"]
