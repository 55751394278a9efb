"""Stock and overlapping model side by side on four ranks, in each layout of tensor, context and expert parallelism."""

from collections.abc import Mapping
from typing import Any

from megatron_lancet.schedule.nodes import Nodes
from megatron_lancet.schedule.plan import fixed_plan
from tests.features.case import LAYOUTS, Case
from tests.features.dedup import cases as dedup
from tests.features.placement import cases as placement
from tests.features.row_bound import cases as row_bound
from tests.features.tiles import cases as tiles
from tests.features.two_hop import cases as two_hop
from tests.parity.gradients.connections import parallel
from tests.parity.gradients.gradients_worker import compare_case
from tests.parity.gradients.hop_rows import profiled_and_sent
from tests.parity.gradients.switching import switch_through_plans

SHARED_EXPERT = {
    "moe_shared_expert_intermediate_size": 48,
    "moe_shared_expert_gate": True,
    "moe_router_load_balancing_type": "seq_aux_loss",
}
ONE_EXPERT_PER_RANK = {"num_moe_experts": 2, "moe_router_topk": 1, "moe_router_pre_softmax": True}
CASES: dict[str, Case] = {
    "EP4/k=1": Case({}, fixed_plan(1), "EP4"),
    "EP4/erratic-wire/k=2": Case({}, fixed_plan(2), "EP4", disturbed=True),
    "EP2xDP2/k=1": Case({}, fixed_plan(1), "EP2xDP2"),
    "EP2xDP2/distributed-optimizer/k=1": Case({"distributed_optimizer": True}, fixed_plan(1), "EP2xDP2"),
    "EP2xDP2/distributed-optimizer/erratic-wire/k=2": Case(
        {"distributed_optimizer": True}, fixed_plan(2), "EP2xDP2", disturbed=True
    ),
    "EP2xTP2/k=1": Case({}, fixed_plan(1), "EP2xTP2"),
    "EP2xTP2/erratic-wire/k=2": Case({}, fixed_plan(2), "EP2xTP2", disturbed=True),
    "EP2xTP2/shared-expert/k=3": Case(SHARED_EXPERT, fixed_plan(3), "EP2xTP2"),
    "EP2xTP2/dropout/k=1": Case({"hidden_dropout": 0.1, "attention_dropout": 0.1}, fixed_plan(1), "EP2xTP2"),
    "EP2xTP2/padding/k=3": Case({**SHARED_EXPERT, "padded": True}, fixed_plan(3), "EP2xTP2"),
    "EP2xETP2/k=1": Case({}, fixed_plan(1), "EP2xETP2"),
    "EP2xETP2/bf16/k=1": Case({"bf16": True}, fixed_plan(1), "EP2xETP2"),
    "EP2xETP2/k=2": Case({}, fixed_plan(2), "EP2xETP2"),
    "EP2xETP2/erratic-wire/k=2": Case({}, fixed_plan(2), "EP2xETP2", disturbed=True),
    "EP2xETP2/one-expert-per-rank/k=2": Case(ONE_EXPERT_PER_RANK, fixed_plan(2), "EP2xETP2"),
    "EP2xCP2/k=1": Case({}, fixed_plan(1), "EP2xCP2"),
    "EP2xCP2/erratic-wire/k=2": Case({}, fixed_plan(2), "EP2xCP2", disturbed=True),
    "EP4xCP2/k=1": Case({}, fixed_plan(1), "EP4xCP2"),
    "EP4xCP2/erratic-wire/k=2": Case({}, fixed_plan(2), "EP4xCP2", disturbed=True),
    "EP2xCP2/padding/k=2": Case({"padded": True, "calculate_per_token_loss": True}, fixed_plan(2), "EP2xCP2"),
    "EP2xTP2xCP2/k=1": Case({}, fixed_plan(1), "EP2xTP2xCP2"),
    "EP2xTP2xCP2/erratic-wire/k=2": Case({}, fixed_plan(2), "EP2xTP2xCP2", disturbed=True),
}
TOP_4 = {"num_moe_experts": 16, "moe_router_topk": 4}
EQUAL = {**CASES, **dedup.IN_LAYOUTS, **tiles.IN_LAYOUTS, **placement.IN_LAYOUTS}
IN_HOPS = {**two_hop.CASES, **row_bound.IN_LAYOUTS, **placement.IN_HOPS}
"""With two nodes."""


def compare_in(layout: str, cases: Mapping[str, Case], nodes: Nodes | None = None) -> dict[str, Any]:
    """What is found in the cases that have this layout."""
    chosen = {name: case for name, case in cases.items() if case.layout == layout}
    if not chosen:
        return {}
    with parallel(LAYOUTS[layout], nodes) as config:
        return {name: compare_case(case, config=config, nodes=nodes) for name, case in chosen.items()}


def compare_hops_in(layout: str) -> dict[str, Any]:
    """The same with two nodes; in one layout also what is damaged, and a model that switches to two hops and back."""
    nodes = two_hop.nodes_of(layout)
    results = compare_in(layout, IN_HOPS, nodes)
    if layout == "EP4":
        with parallel(LAYOUTS[layout], nodes) as config:
            for name, disturb in two_hop.DAMAGED.items():
                results[name] = compare_case(two_hop.IN_DAMAGE, disturb, config, nodes)
            overrides = {**config, "num_moe_experts": 8}
            results["switching"] = switch_through_plans(overrides, True, two_hop.SWITCHED, nodes=nodes)
    return results


def hop_rows_in(layout: str, num_chunks: int) -> dict[str, Any]:
    """What :func:`profiled_and_sent` finds in a layout, by a name for it."""
    with parallel(LAYOUTS[layout], two_hop.nodes_of(layout)) as config:
        return {f"{layout}/rows-of-hops": profiled_and_sent({**config, **TOP_4}, num_chunks)}


def all_results() -> dict[str, Any]:
    """What is found for each case, by its name."""
    from megatron_lancet.training.megatron.patches import sequence_parallel_with_torch_norm

    results: dict[str, Any] = {}
    with sequence_parallel_with_torch_norm():
        for layout in LAYOUTS:
            results |= compare_in(layout, EQUAL | row_bound.OF_REPLICAS)
        for layout in ("EP4", "EP4xTP2", "EP4xCP2", "EP2xETP2"):
            results |= compare_hops_in(layout)
        results |= hop_rows_in("EP4", 1) | hop_rows_in("EP2xETP2", 2)
    return results
