"""Lets the experts of a prepared layer change their ranks: weights move, then tokens follow."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from megatron_lancet.features.placement.experts import exchange, parameters_of_slots, placed
from megatron_lancet.features.placement.router import PlacedRouter
from megatron_lancet.features.placement.slots import Slots
from megatron_lancet.model.adopt import adopt
from megatron_lancet.model.gpt import LanguageModel, overlapping_layers
from megatron_lancet.model.overlapping_moe import OverlappingMoE


def layers_with_experts(stages: Iterable[LanguageModel]) -> Iterator[OverlappingMoE]:
    """The layers of pipeline stages that have experts; a repeated layer once, with its first number."""
    seen: set[torch.nn.Module] = set()
    for stage in stages:
        for layer in overlapping_layers(stage):
            if layer.moe is not None and layer.moe.stock not in seen:
                seen.add(layer.moe.stock)
                yield layer.moe


def slots_of(moe: OverlappingMoE) -> Slots:
    """The slots of a layer's experts; at first Megatron's own. With them experts may be placed anew."""
    stock = moe.stock
    if not isinstance(stock.router, PlacedRouter):
        group = stock.token_dispatcher.ep_group
        slots = Slots(range(stock.config.num_moe_experts), group.rank(), group.size())
        adopt(stock.router, PlacedRouter).slots = slots
        kind: Any = type(stock.experts)
        adopt(stock.experts, placed(kind)).slots = slots
    return stock.router.slots


def place_experts(moe: OverlappingMoE, experts: Sequence[int], moves_weights: bool = True) -> None:
    """Makes the slots of a layer hold other experts from the next step on. Collective over its expert-parallel group.

    Args:
        experts: the logical expert of each slot.
        moves_weights: False in a mocked world, where no other rank has weights.

    Raises:
        UsageError: a parameter belongs to several experts.
    """
    slots = slots_of(moe)
    if moves_weights:
        tensors_of = parameters_of_slots(moe.stock.experts)
        exchange(tensors_of, slots.experts, experts, moe.stock.token_dispatcher.ep_group)
    slots.hold(experts)
