"""Models whose experts are on other ranks than stock's."""

from typing import Any

from megatron_lancet.features.dedup.order import DEDUP
from megatron_lancet.features.two_hop.order import TWO_HOP
from megatron_lancet.schedule.plan import Plan, fixed_plan
from tests.features.case import Case


def placed(overrides: dict[str, Any], plan: Plan, layout: str | None = None) -> Case:
    """A case whose experts move with their weights."""
    return Case(overrides, plan, layout, moves_weights=True)


_GATED = {"num_moe_experts": 16, "moe_router_topk": 4, "gated_linear_unit": True}
_BIAS = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True, "add_bias_linear": True}
CASES = {
    "placed/k=1": placed({}, fixed_plan(1)),
    "placed/dedup/k=1": placed({"num_moe_experts": 8}, fixed_plan(1, dispatch=DEDUP)),
    "placed/expert-bias/k=1": placed(_BIAS, fixed_plan(1)),
    "placed/gated-top-4/k=2": placed(_GATED, fixed_plan(2)),
    "placed/mtp-repeated/k=2": placed({"mtp_num_layers": 2, "mtp_use_repeated_layer": True}, fixed_plan(2)),
    "placed/bf16/k=1": placed({"bf16": True}, fixed_plan(1)),
}
UNMOVED = Case({}, fixed_plan(1), moves_weights=False)
"""Negative control."""
IN_LAYOUTS = {
    "EP4/placed/k=1": placed({"num_moe_experts": 8}, fixed_plan(1), "EP4"),
    "EP2xDP2/placed/k=1": placed({}, fixed_plan(1), "EP2xDP2"),
    "EP2xETP2/placed/k=2": placed({}, fixed_plan(2), "EP2xETP2"),
}
IN_HOPS = {"EP4/placed/two-hop/k=1": placed({"num_moe_experts": 8}, fixed_plan(1, dispatch=TWO_HOP), "EP4")}
