"""Puts the experts of a model on other ranks, and its gradients back on stock's ranks, to be compared."""

from collections.abc import Sequence
from typing import Any

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.moe.moe_layer import MoELayer

from megatron_lancet.features.placement.experts import exchange, parameters_of_slots
from megatron_lancet.features.placement.layers import layers_with_experts, place_experts
from megatron_lancet.planning.load.expert_load import LayerLoad
from megatron_lancet.planning.load.placement import solve

_ROWS = 1_000_000
"""Rows of a layer, among which shares are whole numbers."""


def placements_for(expert_shares: Sequence[Sequence[float]], num_ranks: int) -> list[Sequence[int]]:
    """The expert of each place, by layer, for measured shares of rows."""
    loads = [LayerLoad(1, (tuple(round(share * _ROWS) for share in shares),)) for shares in expert_shares]
    return [solve(load, num_ranks) for load in loads]


def place(model: GPTModel, placements: Sequence[Sequence[int]]) -> None:
    """Changes the places of all experts of a prepared model, before DDP wraps it. Collective."""
    for moe, placement in zip(layers_with_experts([model]), placements, strict=True):
        place_experts(moe, placement)


def bring_gradients_home(model: Any) -> None:
    """Moves the main gradients of placed experts to where stock has them; others stay. Collective.

    To be called once for the gradients of a step.
    """
    for layer in model.modules():
        slots = getattr(layer.router, "slots", None) if isinstance(layer, MoELayer) else None
        if slots is not None:
            gradients = [[vars(one)["main_grad"] for one in its] for its in parameters_of_slots(layer.experts)]
            exchange(gradients, slots.experts, range(len(slots.experts)), layer.token_dispatcher.ep_group)
