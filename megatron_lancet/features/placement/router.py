"""The router of a layer whose experts may be at any slot."""

from collections.abc import Sequence

import torch

from megatron_lancet.features.placement.slots import Slots
from megatron_lancet.model.chunking import Chunk
from megatron_lancet.model.routing.router import ChunkedTopKRouter


class PlacedRouter(ChunkedTopKRouter):
    """The router of a prepared layer. It routes to experts; what leaves it is by slot.

    Attributes:
        slots: where the layer's experts are.
    """

    slots: Slots

    @property
    def local_experts(self) -> Sequence[int]:
        """Numbers of the experts of this rank, in the order of their slots."""
        return self.slots.local_experts

    def forward(
        self, input: torch.Tensor, padding_mask: torch.Tensor | None = None, chunk: Chunk | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Routes the tokens of a chunk; returns probabilities [t, E] and routing map [t, E] (bool), by slot."""
        return self.slots.routed(*super().forward(input, padding_mask, chunk))
