"""Models, plans and layouts with two hops, on ranks of two nodes with two each.

A group of experts fills both nodes. With EP2xETP2 a rank of each holds a half of an expert.
"""

from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import torch

from megatron_lancet.features.dedup.order import DEDUP
from megatron_lancet.features.two_hop.order import TWO_HOP
from megatron_lancet.patching import replaced
from megatron_lancet.planning.dispatch import nodes_of_group
from megatron_lancet.schedule.nodes import Nodes
from megatron_lancet.schedule.plan import ChunkDim, DwPolicy, Gap, OverlapRange, Plan, Segment, fixed_plan
from tests.features.case import LAYOUTS, Case
from tests.features.dedup import cases as dedup
from tests.parity.gradients.disturbances import row_counted_twice
from tests.parity.gradients.variants import FORCED

RANKS_PER_NODE = 2


def nodes_of(layout: str) -> Nodes:
    """How the groups of a layout lie on nodes."""
    sizes = LAYOUTS[layout]
    holders = sizes.get("expert_tensor_parallel_size", 1)
    nodes = nodes_of_group(sizes["expert_model_parallel_size"], holders, RANKS_PER_NODE)
    assert isinstance(nodes, Nodes), nodes
    return nodes


def two_hops(plan: Plan) -> Plan:
    """The fixed plan with the same cut of all layers, and two hops."""
    (segment,) = plan.segments
    return fixed_plan(
        segment.num_chunks,
        chunk_dim=segment.chunk_dim,
        overlap_range=segment.range,
        dispatch=TWO_HOP,
    )


ONE, TWO, THREE = (fixed_plan(count, dispatch=TWO_HOP) for count in (1, 2, 3))
_EIGHT = {"num_moe_experts": 8}
_TOP_4 = {"num_moe_experts": 16, "moe_router_topk": 4}
_BIASED = {key: value for key, value in FORCED["idle-rank"].items() if key != "expert_bias"}
_SEGMENTS = Plan(
    (
        Segment(1, 1, 2, ChunkDim.SEQUENCE),
        Segment(2, None, 3, ChunkDim.BATCH, OverlapRange.GATE),
    ),
    dw_window=8,
    gaps=(
        Gap("L3.c1.I.node_dispatch", ("W.output_layer",)),
        Gap("L2.c1.I.local_combine", ("L3.W.self_attention.linear_qkv", "L3.W.mlp.experts.local_experts.0.linear_fc1")),
    ),
    dispatch=TWO_HOP,
)
_WITH_ROWS_OF_THEIR_OWN = (
    *("plain", "grouped-experts-gated/k=3", "fp64-router", "bf16", "capacity"),
    *("full-recompute", "selective-recompute", "mtp-repeated"),
)
CASES: dict[str, Case] = {
    # One expert a rank: no token goes twice to a rank, but to two ranks of a node. Models differ where rows do.
    **{
        f"EP4/{name.replace('dedup', 'two-hop')}": case._replace(plan=two_hops(case.plan), layout="EP4")
        for name, case in dedup.CASES.items()
        if name.startswith(_WITH_ROWS_OF_THEIR_OWN)
    },
    "EP4/eight-experts/two-hop/k=1": Case(_EIGHT, ONE, "EP4", disturbed=True),
    "EP4/top-4/two-hop/k=1": Case(_TOP_4, ONE, "EP4", changes_sums=True),
    "EP4/no-dw/two-hop/k=2": Case(_EIGHT, fixed_plan(2, DwPolicy.NONE, dispatch=TWO_HOP), "EP4", disturbed=True),
    "EP4/distributed-optimizer/two-hop/k=2": Case({"distributed_optimizer": True, **_EIGHT}, TWO, "EP4"),
    "EP4/segments/two-hop": Case(_EIGHT, _SEGMENTS, "EP4", disturbed=True),
    "EP4/idle-rank/two-hop/k=1": Case(
        {**_BIASED, "expert_bias": [0.0, -9.0, 0.0, 0.0]}, ONE, "EP4", disturbed=True, idle=(1,)
    ),
    "EP4/idle-node/two-hop/k=3": Case(
        {**_BIASED, "expert_bias": [9.0, 9.0, 0.0, 0.0]}, THREE, "EP4", disturbed=True, idle=(2, 3)
    ),
    "EP4/all-to-one-rank/two-hop/k=1": Case(
        {**_BIASED, **_EIGHT, "expert_bias": [0.0] * 4 + [9.0] * 2 + [0.0] * 2}, ONE, "EP4", idle=(0, 1, 3)
    ),
    "EP4xTP2/two-hop/k=1": Case(_EIGHT, ONE, "EP4xTP2"),
    "EP4xTP2/shared-expert/two-hop/k=2": Case({"moe_shared_expert_intermediate_size": 48}, TWO, "EP4xTP2"),
    "EP4xCP2/two-hop/k=1": Case(_EIGHT, ONE, "EP4xCP2"),
    "EP4xCP2/top-4/two-hop/k=2": Case(_TOP_4, TWO, "EP4xCP2", disturbed=True),
    "EP2xETP2/two-hop/k=1": Case({}, ONE, "EP2xETP2", changes_sums=True),
    "EP2xETP2/bf16/two-hop/k=1": Case({"bf16": True}, ONE, "EP2xETP2", changes_sums=True),
    "EP2xETP2/top-4/two-hop/k=2": Case({"num_moe_experts": 8, "moe_router_topk": 4}, TWO, "EP2xETP2", disturbed=True),
}
SWITCHED: dict[str, Plan] = {
    "whole": fixed_plan(1),
    "whole-two-hop": ONE,
    "whole-dedup": fixed_plan(1, dispatch=DEDUP),
    "batch-two-hop": TWO,
}
"""Plans of one model, one after the other."""


def rows_in_the_order_of_arrival(stack: ExitStack) -> None:
    """Negative control: experts get the rows of ways one after the other, and not in stock's order."""
    from megatron_lancet.features.two_hop import dispatcher as two_hop

    def of_parts(sizes: Any, reordered: Any, num_rows: int) -> Any:
        return SimpleNamespace(index_m=torch.arange(num_rows))

    stack.enter_context(replaced(two_hop, "RowOrder", SimpleNamespace(of_parts=of_parts)))


IN_DAMAGE = Case(_EIGHT, ONE, "EP4")
DAMAGED: dict[str, Callable[[ExitStack], None]] = {
    "EP4/row-counted-twice": row_counted_twice,
    "EP4/order-of-arrival": rows_in_the_order_of_arrival,
}
"""What disturbs :data:`IN_DAMAGE`."""
