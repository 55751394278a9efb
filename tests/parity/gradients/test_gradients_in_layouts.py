"""Every gradient and the order of collectives with tensor, context and expert tensor parallelism: against stock."""

from collections import Counter

import pytest

from benchmarks.gradient_error import worst
from tests.features.placement.cases import IN_HOPS as PLACED_IN_HOPS
from tests.features.row_bound import cases as row_bound
from tests.features.two_hop import cases as two_hop
from tests.gradient_deviations import TOLERANCE
from tests.parity.gradients.layouts_worker import EQUAL, all_results
from tests.ranks import launch

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1020)]

results = launch.results(all_results, 4, timeout_s=1000)
"""Per rank: what is found for each case."""


@pytest.mark.parametrize("case", [*EQUAL, *PLACED_IN_HOPS])
def test_gradients_equal_stock(results, case, check_gradients):
    is_exact = {**EQUAL, **PLACED_IN_HOPS}[case].is_exact
    check_gradients.equal_stock(results, case, 0.0 if is_exact else TOLERANCE)
    assert all(result[case]["zero_gradients"] == [] for result in results)


@pytest.mark.parametrize("case", EQUAL)
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
    """In each of two layers attention's two and two experts' two, and the output layer."""
    assert len(results[0][case]["reports_of_deferred"]) == 2 * (2 + 2 * 2) + 1


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


@pytest.mark.parametrize("case", row_bound.IN_LAYOUTS)
def test_gradients_of_chunks_in_rounds_equal_stock(results, case, check_gradients):
    assert all(result[case]["collectives"] == results[0][case]["collectives"] for result in results)
    check_gradients.equal_stock(results, case, TOLERANCE)
    for result in results:
        found = result[case]
        assert found["peak_expert_rows"] <= row_bound.IN_LAYOUTS[case].max_rows
        assert found["num_split_chunks"] == found["num_chunks"] > 0


@pytest.mark.parametrize("case", row_bound.OF_REPLICAS)
def test_gradients_of_unlike_replicas_equal_stock(results, case, check_gradients):
    check_gradients.equal_stock(results, case, TOLERANCE)
    assert len({result[case]["num_split_chunks"] for result in results}) == 2


@pytest.mark.parametrize("case", two_hop.CASES)
def test_gradients_of_two_hops_equal_stock(results, case, check_gradients):
    settings = two_hop.CASES[case]
    bound = 0.0 if settings.is_exact else TOLERANCE
    if case == "EP2xETP2/bf16/two-hop/k=1":
        bound = 2**-6  # a holder's sum over its experts is rounded, 2^-9, before it is added to the other's
    check_gradients.equal_stock(results, case, bound)
    for rank, result in enumerate(results):
        found = result[case]
        experts = [name for name in found["parameters"] if ".experts." in name]
        assert found["zero_gradients"] == (experts if rank in settings.idle else [])
        assert found["expert_bias_counts_equal"]


@pytest.mark.parametrize("case", two_hop.CASES)
def test_order_of_hops_is_the_same_on_all_ranks(results, case):
    """Each of four messages of a layer and chunk, in both directions, also where a rank or a node has no row."""
    collectives = [result[case]["collectives"] for result in results]
    assert all(order == collectives[0] for order in collectives)
    kinds = Counter(op.rsplit(".", 2)[-1] for op in collectives[0] if ".F." in op)
    assert set(kinds) == {"counts", "node_dispatch", "local_dispatch", "local_combine", "node_combine"}
    assert len(set(kinds.values())) == 1
    backward = Counter(op.rsplit(".", 2)[-1] for op in collectives[0] if ".I." in op)
    recomputes = "full-recompute" in case
    assert recomputes or backward == {kind: number for kind, number in kinds.items() if kind != "counts"}


def test_switching_to_two_hops_and_back_changes_no_gradient(results, check_gradients):
    for result in results:
        for found, expected in zip(result["switching"], results[0]["switching"], strict=True):
            bound = 0.0 if found["plan"].startswith("whole") else TOLERANCE
            check_gradients(found["gradients"], bound, found["plan"])
            assert found["loss"] <= bound, found["plan"]
            assert found["reports"] == dict.fromkeys(found["gradients"], 1), found["plan"]
            assert found["collectives"] == expected["collectives"]
            has_hops = any("node_dispatch" in op for op in found["collectives"])
            assert has_hops == found["plan"].endswith("two-hop")


def test_gradient_comparison_detects_a_damaged_sum_of_two_hops(results):
    for result in results:
        assert worst(result["EP4/row-counted-twice"]["gradients"])[1] > 1e4 * TOLERANCE


def test_gradient_comparison_detects_reordered_rows_of_two_hops(results):
    """The experts' weight gradients are the same sums, in another order: a comparison of bits sees it."""
    assert all(0 < worst(result["EP4/order-of-arrival"]["gradients"])[1] <= TOLERANCE for result in results)


@pytest.mark.parametrize(("layout", "num_messages", "own_ranks"), [("EP4", 24, (0, 1, 2, 3)), ("EP2xETP2", 48, (0, 2))])
def test_profile_of_plain_steps_has_the_bytes_of_two_hops(results, layout, num_messages, own_ranks):
    """Of three layers, in one and in two chunks; the profile has the first of two groups that share their experts."""
    found = [result[f"{layout}/rows-of-hops"] for result in results]
    for rank, one in enumerate(found):
        assert len(one["sent"]) == num_messages
        assert min(one["sent"].values()) > 0
        assert one["profiled"] == (one["sent"] if rank in own_ranks else {})
