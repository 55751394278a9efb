"""Models, plans and layouts with two hops on four ranks, as two nodes of two: what is compared with stock."""

from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from megatron_lancet.features.dedup.order import DEDUP
from megatron_lancet.features.two_hop.order import TWO_HOP
from megatron_lancet.patching import replaced
from megatron_lancet.schedule.comm_dtype import CommDtype
from megatron_lancet.schedule.nodes import Nodes, nodes_of_group
from megatron_lancet.schedule.plan import ChunkDim, DwPolicy, Gap, OverlapRange, Plan, Segment, fixed_plan
from tests.parity.gradients.disturbances import erratic_wire, row_counted_twice
from tests.parity.gradients.variants import DEDUP_CASES, FORCED

RANKS_PER_NODE = 2
LAYOUTS: dict[str, dict[str, int]] = {
    "EP4": {"expert_model_parallel_size": 4},
    "EP4xTP2": {"expert_model_parallel_size": 4, "tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
    "EP4xCP2": {"expert_model_parallel_size": 4, "context_parallel_size": 2},
    "EP2xETP2": {"expert_model_parallel_size": 2, "tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2},
}
"""Those in which a group of experts fills both nodes. With EP2xETP2 a rank of each holds a half of an expert."""


class HopCase(NamedTuple):
    """A model, its layout and its plan.

    Attributes:
        layout: of :data:`LAYOUTS`.
        overrides: of the config, see ``gradients_worker.build``.
        disturb: what disturbs the run.
        comm_dtype: number format of the messages.
        idle: ranks whose experts get no token.
    """

    layout: str
    overrides: dict[str, Any]
    plan: Plan
    disturb: Callable[[ExitStack], None] | None = None
    comm_dtype: CommDtype = CommDtype.EXACT
    idle: tuple[int, ...] = ()

    @property
    def is_exact(self) -> bool:
        """Whether the results must be stock's to the bit: sums of two summands have one order."""
        has_parts = LAYOUTS[self.layout].get("expert_tensor_parallel_size", 1) > 1
        return self.plan.num_chunks == 1 and not has_parts and self.overrides.get("moe_router_topk", 2) <= 2


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
CASES: dict[str, HopCase] = {
    # One expert a rank: no token goes twice to a rank, but to two ranks of a node.
    **{
        f"EP4/{name.replace('dedup', 'two-hop')}": HopCase(
            "EP4", case.overrides, two_hops(case.plan), erratic_wire if case.disturbed else None
        )
        for name, case in DEDUP_CASES.items()
        if len(case.plan.segments) == 1 and "expert_bias" not in case.overrides
    },
    "EP4/eight-experts/two-hop/k=1": HopCase("EP4", _EIGHT, ONE, erratic_wire),
    "EP4/top-4/two-hop/k=1": HopCase("EP4", _TOP_4, ONE),
    "EP4/no-dw/two-hop/k=2": HopCase("EP4", _EIGHT, fixed_plan(2, DwPolicy.NONE, dispatch=TWO_HOP), erratic_wire),
    "EP4/distributed-optimizer/two-hop/k=2": HopCase("EP4", {"distributed_optimizer": True, **_EIGHT}, TWO),
    "EP4/segments/two-hop": HopCase("EP4", _EIGHT, _SEGMENTS, erratic_wire),
    "EP4/idle-rank/two-hop/k=1": HopCase(
        "EP4", {**_BIASED, "expert_bias": [0.0, -9.0, 0.0, 0.0]}, ONE, erratic_wire, idle=(1,)
    ),
    "EP4/idle-node/two-hop/k=3": HopCase(
        "EP4", {**_BIASED, "expert_bias": [9.0, 9.0, 0.0, 0.0]}, THREE, erratic_wire, idle=(2, 3)
    ),
    "EP4/all-to-one-rank/two-hop/k=1": HopCase(
        "EP4", {**_BIASED, **_EIGHT, "expert_bias": [0.0] * 4 + [9.0] * 2 + [0.0] * 2}, ONE, idle=(0, 1, 3)
    ),
    "EP4xTP2/two-hop/k=1": HopCase("EP4xTP2", _EIGHT, ONE),
    "EP4xTP2/shared-expert/two-hop/k=2": HopCase("EP4xTP2", {"moe_shared_expert_intermediate_size": 48}, TWO),
    "EP4xCP2/two-hop/k=1": HopCase("EP4xCP2", _EIGHT, ONE),
    "EP4xCP2/top-4/two-hop/k=2": HopCase("EP4xCP2", _TOP_4, TWO, erratic_wire),
    "EP2xETP2/two-hop/k=1": HopCase("EP2xETP2", {}, ONE),
    "EP2xETP2/bf16/two-hop/k=1": HopCase("EP2xETP2", {"bf16": True}, ONE),
    "EP2xETP2/top-4/two-hop/k=2": HopCase("EP2xETP2", {"num_moe_experts": 8, "moe_router_topk": 4}, TWO, erratic_wire),
}
NARROW: dict[str, HopCase] = {
    "EP4/fp8-messages/two-hop/k=1": HopCase("EP4", _EIGHT, ONE, comm_dtype=CommDtype.FP8),
}
"""Messages whose hidden states are rounded, now in each of two hops."""
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

    def by_dims(sizes: Any, dims: Any, num_rows: int) -> Any:
        return SimpleNamespace(index_m=torch.arange(num_rows))

    stack.enter_context(replaced(two_hop, "RowOrder", SimpleNamespace(by_dims=by_dims)))


DAMAGED: dict[str, HopCase] = {
    "EP4/row-counted-twice": HopCase("EP4", _EIGHT, ONE, row_counted_twice),
    "EP4/order-of-arrival": HopCase("EP4", _EIGHT, ONE, rows_in_the_order_of_arrival),
}
