"""Models whose experts are on other ranks than stock's: their placements, and their gradients on stock's ranks."""

import random
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from megatron_lancet.features.dedup.order import DEDUP
from megatron_lancet.features.two_hop.order import TWO_HOP
from megatron_lancet.schedule.plan import Plan, fixed_plan


class PlacedCase(NamedTuple):
    """A model, its plan, and whether weights move with their experts.

    Attributes:
        layout: of the layouts of four ranks; None on two ranks.
        overrides: of the config, see ``gradients_worker.build``.
    """

    overrides: dict[str, Any]
    plan: Plan
    layout: str | None = None
    moves_weights: bool = True

    @property
    def is_exact(self) -> bool:
        """Whether the results must be stock's to the bit: sums of two summands have one order."""
        sums_two = self.overrides.get("moe_router_topk", 2) <= 2 and self.layout != "EP2xETP2"
        return sums_two and self.plan.num_chunks == 1


_GATED = {"num_moe_experts": 16, "moe_router_topk": 4, "gated_linear_unit": True}
_BIAS = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True, "add_bias_linear": True}
CASES = {
    "placed/k=1": PlacedCase({}, fixed_plan(1)),
    "placed/dedup/k=1": PlacedCase({"num_moe_experts": 8}, fixed_plan(1, dispatch=DEDUP)),
    "placed/expert-bias/k=1": PlacedCase(_BIAS, fixed_plan(1)),
    "placed/gated-top-4/k=2": PlacedCase(_GATED, fixed_plan(2)),
    "placed/mtp-repeated/k=2": PlacedCase({"mtp_num_layers": 2, "mtp_use_repeated_layer": True}, fixed_plan(2)),
    "placed/bf16/k=1": PlacedCase({"bf16": True}, fixed_plan(1)),
}
UNMOVED = PlacedCase({}, fixed_plan(1), moves_weights=False)
IN_LAYOUTS = {
    "EP4/placed/k=1": PlacedCase({"num_moe_experts": 8}, fixed_plan(1), "EP4"),
    "EP2xDP2/placed/k=1": PlacedCase({}, fixed_plan(1), "EP2xDP2"),
    "EP2xETP2/placed/k=2": PlacedCase({}, fixed_plan(2), "EP2xETP2"),
}
_TWO_HOP = fixed_plan(1, dispatch=TWO_HOP)
IN_HOPS = {"EP4/placed/two-hop/k=1": PlacedCase({"num_moe_experts": 8}, _TWO_HOP, "EP4")}


def placement_of(layer: int, num_experts: int) -> Sequence[int]:
    """Another permutation in each layer."""
    return random.Random(layer).sample(range(num_experts), num_experts)


def place(model: Any, case: PlacedCase | None) -> None:
    """Changes the slots of all experts of a prepared model; without a case nothing."""
    from megatron_lancet.model.expert_placement import layers_with_experts, place_experts

    for moe in layers_with_experts([model] if case is not None else []):
        placement = placement_of(moe.number, moe.stock.config.num_moe_experts)
        place_experts(moe, placement, moves_weights=case is not None and case.moves_weights)


def bring_gradients_home(model: Any) -> None:
    """Moves the main gradients of placed experts to where stock has them; others stay."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from megatron_lancet.model.local_experts.placed import exchange, parameters_of_slots

    for layer in model.modules():
        slots = getattr(layer.router, "slots", None) if isinstance(layer, MoELayer) else None
        if slots is not None:
            tensors_of = [[one.main_grad for one in its] for its in parameters_of_slots(layer.experts)]
            exchange(tensors_of, slots.experts, range(len(slots.experts)), layer.token_dispatcher.ep_group)


def numbers_in_checkpoints(model: Any) -> list[list[int]]:
    """Of each part of each local expert in a checkpoint: the expert's number there, and the one that it has."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    from megatron_lancet.model.expert_placement import layers_with_experts, slots_of

    found = []
    for moe in layers_with_experts([model]):
        for name, part in moe.stock.experts.sharded_state_dict().items():
            built = part.build() if isinstance(part, ShardedTensorFactory) else [part]
            slot = int(re.findall(r"\d+", name.replace("linear_fc1", "").replace("linear_fc2", "") + " 0")[0])
            found += [[one.global_offset[0], slots_of(moe).local_experts[slot]] for one in built]
    return found
