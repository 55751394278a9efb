"""Stock and overlapping model side by side on four ranks, in each layout of tensor, context and expert parallelism."""

from dataclasses import replace
from typing import Any

from megatron_lancet.features.dedup.order import DEDUP
from megatron_lancet.schedule.dispatch import PLAIN, Dispatch
from tests.parity.gradients import hops
from tests.parity.gradients.connections import parallel
from tests.parity.gradients.disturbances import erratic_wire
from tests.parity.gradients.gradients_worker import compare_plan, plan_of
from tests.parity.gradients.hop_rows import profiled_and_sent
from tests.parity.gradients.placed import IN_HOPS, IN_LAYOUTS
from tests.parity.gradients.switching import switch_through_plans
from tests.parity.load import guarded
from tests.parity.tiles import cases as tiled

LAYOUTS: dict[str, dict[str, int]] = {
    "EP4": {"expert_model_parallel_size": 4},
    "EP2xDP2": {"expert_model_parallel_size": 2},
    "EP2xTP2": {"expert_model_parallel_size": 2, "tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
    "EP2xETP2": {"expert_model_parallel_size": 2, "tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2},
    "EP2xCP2": {"expert_model_parallel_size": 2, "context_parallel_size": 2},
    "EP4xCP2": {"expert_model_parallel_size": 4, "context_parallel_size": 2},
    "EP2xTP2xCP2": {
        "expert_model_parallel_size": 2,
        "tensor_model_parallel_size": 2,
        "context_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
    },
}
SHARED_EXPERT = {
    "moe_shared_expert_intermediate_size": 48,
    "moe_shared_expert_gate": True,
    "moe_router_load_balancing_type": "seq_aux_loss",
}
ONE_EXPERT_PER_RANK = {"num_moe_experts": 2, "moe_router_topk": 1, "moe_router_pre_softmax": True}
CASES: dict[str, tuple[str, dict[str, Any], int, Any]] = {
    "EP4/k=1": ("EP4", {}, 1, None),
    "EP4/erratic-wire/k=2": ("EP4", {}, 2, erratic_wire),
    "EP2xDP2/k=1": ("EP2xDP2", {}, 1, None),
    "EP2xDP2/distributed-optimizer/k=1": ("EP2xDP2", {"distributed_optimizer": True}, 1, None),
    "EP2xDP2/distributed-optimizer/erratic-wire/k=2": ("EP2xDP2", {"distributed_optimizer": True}, 2, erratic_wire),
    "EP2xTP2/k=1": ("EP2xTP2", {}, 1, None),
    "EP2xTP2/erratic-wire/k=2": ("EP2xTP2", {}, 2, erratic_wire),
    "EP2xTP2/shared-expert/k=3": ("EP2xTP2", SHARED_EXPERT, 3, None),
    "EP2xTP2/dropout/k=1": ("EP2xTP2", {"hidden_dropout": 0.1, "attention_dropout": 0.1}, 1, None),
    "EP2xTP2/padding/k=3": ("EP2xTP2", {**SHARED_EXPERT, "padded": True}, 3, None),
    "EP2xETP2/k=1": ("EP2xETP2", {}, 1, None),
    "EP2xETP2/bf16/k=1": ("EP2xETP2", {"bf16": True}, 1, None),
    "EP2xETP2/k=2": ("EP2xETP2", {}, 2, None),
    "EP2xETP2/erratic-wire/k=2": ("EP2xETP2", {}, 2, erratic_wire),
    "EP2xETP2/one-expert-per-rank/k=2": ("EP2xETP2", ONE_EXPERT_PER_RANK, 2, None),
    "EP2xCP2/k=1": ("EP2xCP2", {}, 1, None),
    "EP2xCP2/erratic-wire/k=2": ("EP2xCP2", {}, 2, erratic_wire),
    "EP4xCP2/k=1": ("EP4xCP2", {}, 1, None),
    "EP4xCP2/erratic-wire/k=2": ("EP4xCP2", {}, 2, erratic_wire),
    "EP2xCP2/padding/k=2": ("EP2xCP2", {"padded": True, "calculate_per_token_loss": True}, 2, None),
    "EP2xTP2xCP2/k=1": ("EP2xTP2xCP2", {}, 1, None),
    "EP2xTP2xCP2/erratic-wire/k=2": ("EP2xTP2xCP2", {}, 2, erratic_wire),
}
"""Layout, overrides of the config, number of chunks, what disturbs the run."""
TOP_4 = {"num_moe_experts": 16, "moe_router_topk": 4}
DEDUP_CASES: dict[str, tuple[str, dict[str, Any], int, Any]] = {
    "EP4/dedup/k=1": ("EP4", {"num_moe_experts": 8}, 1, None),
    "EP4/dedup/top-4/k=1": ("EP4", TOP_4, 1, erratic_wire),
    "EP2xTP2/dedup/k=1": ("EP2xTP2", {}, 1, None),
    "EP2xETP2/dedup/k=1": ("EP2xETP2", {}, 1, None),
    "EP2xCP2/dedup/k=1": ("EP2xCP2", {}, 1, None),
}
"""The same with the deduplicated dispatch."""
CHANGES_SUMS = ("EP4/dedup/top-4/k=1", "EP2xETP2/dedup/k=1")
"""Four experts per token, or the parts of an expert on two ranks: outputs are summed in another order than stock's."""


def compare_in(
    layout: str, cases: dict[str, tuple[str, dict[str, Any], int, Any]], dispatch: Dispatch = PLAIN
) -> dict[str, Any]:
    """What :func:`compare_plan` finds in those of ``cases`` that have this layout."""
    with parallel(LAYOUTS[layout]) as config:
        return {
            name: compare_plan({**config, **overrides}, replace(plan_of(num_chunks), dispatch=dispatch), disturb)
            for name, (its_layout, overrides, num_chunks, disturb) in cases.items()
            if its_layout == layout
        }


def compare_placed_in(layout: str) -> dict[str, Any]:
    """The same with experts on other ranks than stock's."""
    with parallel(LAYOUTS[layout]) as config:
        return {
            name: compare_plan({**config, **case.overrides}, case.plan, placed=case)
            for name, case in IN_LAYOUTS.items()
            if case.layout == layout
        }


def compare_tiled_in(layout: str) -> dict[str, Any]:
    """The same with rows that go to other ranks in tiles."""
    with parallel(LAYOUTS[layout]) as config:
        return {
            name: compare_plan({**config, **case.overrides}, case.plan, erratic_wire if case.disturbed else None)
            for name, case in tiled.IN_LAYOUTS.items()
            if case.layout == layout
        }


def compare_hops_in(layout: str) -> dict[str, Any]:
    """The same for the cases with two hops, with limits of rows, and for one model that switches to them and back."""
    nodes = hops.nodes_of(layout)
    with parallel(hops.LAYOUTS[layout], nodes) as config:
        results: dict[str, Any] = {
            name: compare_plan(
                {**config, **case.overrides}, case.plan, case.disturb, comm_dtype=case.comm_dtype, nodes=nodes
            )
            for name, case in {**hops.CASES, **hops.NARROW, **hops.DAMAGED}.items()
            if case.layout == layout
        }
        for name, (its_layout, guard) in guarded.IN_LAYOUTS.items():
            if its_layout == layout:
                overrides, disturb = {**config, **guard.overrides}, erratic_wire if guard.disturbed else None
                results[name] = compare_plan(overrides, guard.plan, disturb, nodes=nodes, max_rows=guard.max_rows)
        if layout == "EP4":
            for name, case in IN_HOPS.items():
                results[name] = compare_plan({**config, **case.overrides}, case.plan, nodes=nodes, placed=case)
            overrides = {**config, "num_moe_experts": 8}
            results["switching"] = switch_through_plans(overrides, True, hops.SWITCHED, nodes=nodes)
        return results


def hop_rows_in(layout: str, num_chunks: int) -> dict[str, Any]:
    """What :func:`profiled_and_sent` finds in a layout, by a name for it."""
    with parallel(LAYOUTS[layout], hops.nodes_of(layout)) as config:
        return {f"{layout}/rows-of-hops": profiled_and_sent({**config, **TOP_4}, num_chunks)}


def all_results() -> dict[str, Any]:
    """What is found for each case, by its name."""
    from megatron_lancet.training.megatron.patches import sequence_parallel_with_torch_norm

    results: dict[str, Any] = {}
    with sequence_parallel_with_torch_norm():
        for layout in LAYOUTS:
            results |= compare_in(layout, CASES)
            results |= compare_in(layout, DEDUP_CASES, DEDUP)
            results |= compare_tiled_in(layout)
        for layout in ("EP4", "EP2xDP2", "EP2xETP2"):
            results |= compare_placed_in(layout)
        for layout in hops.LAYOUTS:
            results |= compare_hops_in(layout)
        results |= hop_rows_in("EP4", 1) | hop_rows_in("EP2xETP2", 2)
    return results
