"""Gradients of Transformer Engine's layers with tensor, context, data and expert tensor parallelism: against stock."""

from typing import Any

import pytest

from megatron_lancet.schedule.plan import fixed_plan
from tests.features.case import LAYOUTS, Case
from tests.features.two_hop import cases as two_hop
from tests.gradient_deviations import TOLERANCE, precision_of
from tests.parity.gradients import layouts_worker
from tests.parity.gradients.layouts_worker import compare_in
from tests.parity.te.variants import FUSED, TE
from tests.ranks import launch

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(480)]

SHARDED = {"distributed_optimizer": True}
CASES: dict[str, Case] = {
    f"{layout}/{name}": Case({**TE, **overrides}, fixed_plan(num_chunks), layout, "erratic-wire" in name)
    for layout, name, overrides, num_chunks in (
        ("EP4", "k=1", {}, 1),
        ("EP4", "fused/erratic-wire/k=2", FUSED, 2),
        ("EP2xDP2", "fused/distributed-optimizer/k=1", {**FUSED, **SHARDED}, 1),
        ("EP2xDP2", "distributed-optimizer/erratic-wire/k=2", SHARDED, 2),
        ("EP2xTP2", "k=1", {}, 1),
        ("EP2xTP2", "fused/shared-expert/k=3", {**FUSED, **layouts_worker.SHARED_EXPERT}, 3),
        ("EP2xTP2", "erratic-wire/k=2", {}, 2),
        ("EP2xETP2", "k=1", {}, 1),
        ("EP2xETP2", "fused/k=2", FUSED, 2),
        # Transformer Engine has context parallelism for bf16 and fp16 only.
        *(
            ("EP2xCP2", f"bf16/{kind}/k={k}", {**FUSED, "bf16": True, "cp_comm_type": kind}, k)
            for kind in ("p2p", "a2a")
            for k in (1, 2)
        ),
    )
}
HOPS: dict[str, Case] = {
    "EP4/fused/two-hop/k=1": Case({**TE, **FUSED, "num_moe_experts": 8}, two_hop.ONE, "EP4", disturbed=True),
    "EP4/two-hop/k=2": Case(TE, two_hop.TWO, "EP4", disturbed=True),
}
"""With two nodes of two ranks."""
BF16_TOLERANCE = 2e-2
"""Chunks round other partial sums to bf16: a weight's gradient is a sum of those of two chunks."""


def all_results() -> dict[str, Any]:
    """What is found for each case, by its name."""
    results: dict[str, Any] = {}
    for layout in LAYOUTS:
        results |= compare_in(layout, CASES)
    return results | compare_in("EP4", HOPS, two_hop.nodes_of("EP4"))


results = launch.results(all_results, 4, timeout_s=460, te=launch.Te())
"""Per rank: what is found for each case."""


@pytest.mark.parametrize("case", [*CASES, *HOPS])
def test_te_gradients_equal_stock_in_layouts(results, case, check_gradients):
    chunked = BF16_TOLERANCE if precision_of(case) == "bf16" else TOLERANCE
    bound = 0.0 if case.endswith("/k=1") else chunked
    check_gradients.equal_stock(results, case, bound)
    for result in results:
        assert result[case]["zero_gradients"] == []
        assert set(result[case]["reports_of_deferred"]) == {3}


@pytest.mark.parametrize("case", [*CASES, *HOPS])
def test_te_order_of_collectives_is_the_same_on_all_ranks(results, case):
    collectives = [result[case]["collectives"] for result in results]
    assert all(order == collectives[0] for order in collectives)
    assert any(f".I.{'node_' if case in HOPS else ''}dispatch" in op for op in collectives[0])
