"""Puts a model's experts on other ranks than stock's, and brings their gradients back."""

import random
import re
from collections.abc import Sequence
from typing import Any


def placement_of(layer: int, num_experts: int) -> Sequence[int]:
    """Another permutation in each layer."""
    return random.Random(layer).sample(range(num_experts), num_experts)


def place(model: Any, moves_weights: bool | None) -> None:
    """Changes the slots of all experts of a prepared model, with or without their weights; for None nothing."""
    from megatron_lancet.features.placement.layers import layers_with_experts, place_experts

    for moe in layers_with_experts([model] if moves_weights is not None else []):
        placement = placement_of(moe.number, moe.stock.config.num_moe_experts)
        place_experts(moe, placement, moves_weights=bool(moves_weights))


def bring_gradients_home(model: Any) -> None:
    """Moves the main gradients of placed experts to where stock has them; others stay."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from megatron_lancet.features.placement.experts import exchange, parameters_of_slots

    for layer in model.modules():
        slots = getattr(layer.router, "slots", None) if isinstance(layer, MoELayer) else None
        if slots is not None:
            tensors_of = [[one.main_grad for one in its] for its in parameters_of_slots(layer.experts)]
            exchange(tensors_of, slots.experts, range(len(slots.experts)), layer.token_dispatcher.ep_group)


def numbers_in_checkpoints(model: Any) -> list[list[int]]:
    """Of each part of each local expert in a checkpoint: the expert's number there, and the one that it has."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    from megatron_lancet.features.placement.layers import layers_with_experts, slots_of

    found = []
    for moe in layers_with_experts([model]):
        for name, part in moe.stock.experts.sharded_state_dict().items():
            built = part.build() if isinstance(part, ShardedTensorFactory) else [part]
            slot = int(re.findall(r"\d+", name.replace("linear_fc1", "").replace("linear_fc2", "") + " 0")[0])
            found += [[one.global_offset[0], slots_of(moe).local_experts[slot]] for one in built]
    return found
