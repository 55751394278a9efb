"""Gradients of Transformer Engine's layers with tensor, context, data and expert tensor parallelism: against stock."""

from typing import Any

import pytest

from megatron_lancet.schedule.plan import Plan
from tests.gradient_deviations import TOLERANCE, precision_of
from tests.parity.gradients import hops, layouts_worker
from tests.parity.gradients.disturbances import erratic_wire
from tests.parity.gradients.gradients_worker import compare_plan
from tests.parity.gradients.layouts_worker import LAYOUTS, compare_in, parallel
from tests.parity.te.variants import FUSED, TE
from tests.ranks import launch

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(480)]

SHARDED = {"distributed_optimizer": True}
CASES: dict[str, tuple[str, dict[str, Any], int, Any]] = {
    f"{layout}/{name}": (layout, {**TE, **overrides}, num_chunks, disturb)
    for layout, name, overrides, num_chunks, disturb in (
        ("EP4", "k=1", {}, 1, None),
        ("EP4", "fused/erratic-wire/k=2", FUSED, 2, erratic_wire),
        ("EP2xDP2", "fused/distributed-optimizer/k=1", {**FUSED, **SHARDED}, 1, None),
        ("EP2xDP2", "distributed-optimizer/erratic-wire/k=2", SHARDED, 2, erratic_wire),
        ("EP2xTP2", "k=1", {}, 1, None),
        ("EP2xTP2", "fused/shared-expert/k=3", {**FUSED, **layouts_worker.SHARED_EXPERT}, 3, None),
        ("EP2xTP2", "erratic-wire/k=2", {}, 2, erratic_wire),
        ("EP2xETP2", "k=1", {}, 1, None),
        ("EP2xETP2", "fused/k=2", FUSED, 2, None),
        # Transformer Engine has context parallelism for bf16 and fp16 only.
        *(
            ("EP2xCP2", f"bf16/{kind}/k={k}", {**FUSED, "bf16": True, "cp_comm_type": kind}, k, None)
            for kind in ("p2p", "a2a")
            for k in (1, 2)
        ),
    )
}
"""Layout, overrides of the config, number of chunks, what disturbs the run."""
HOPS: dict[str, tuple[dict[str, Any], Plan]] = {
    "EP4/fused/two-hop/k=1": ({**TE, **FUSED, "num_moe_experts": 8}, hops.ONE),
    "EP4/two-hop/k=2": (TE, hops.TWO),
}
"""Overrides and plan, with two nodes of two ranks."""
BF16_TOLERANCE = 2e-2
"""Chunks round other partial sums to bf16: a weight's gradient is a sum of those of two chunks."""


def compare_hops() -> dict[str, Any]:
    nodes = hops.nodes_of("EP4")
    with parallel(LAYOUTS["EP4"], nodes) as config:
        return {
            name: compare_plan({**config, **overrides}, plan, erratic_wire, nodes=nodes)
            for name, (overrides, plan) in HOPS.items()
        }


def all_results() -> dict[str, Any]:
    """What is found for each case, by its name."""
    results: dict[str, Any] = {}
    for layout in LAYOUTS:
        results |= compare_in(layout, CASES)
    return results | compare_hops()


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
