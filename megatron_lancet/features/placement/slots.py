"""Slots of experts: a layer's experts in an order of our own, of which each rank holds its part.

Inside the router, and so in losses, expert bias, logs and checkpoints, experts have the model's numbers (logical ones).
The router's output is by slot; dispatchers, counts and the experts' modules use only slots. A placement is a
permutation, so that gradients of experts are stock's; sums over a token's experts run in another order.

Legend of shapes: t tokens, E experts.
"""

from collections.abc import Sequence
from typing import Any

import torch


class Slots:
    """The expert in each slot of a layer; the slots of a rank are neighbours, in rank order."""

    def __init__(self, experts: Sequence[int], rank: int, num_ranks: int) -> None:
        """
        Args:
            experts: the logical expert of each slot.
            rank: this rank's place in the expert-parallel group.
            num_ranks: ranks of the group.
        """
        self._rank, self._num_ranks = rank, num_ranks
        self.hold(experts)

    def hold(self, experts: Sequence[int]) -> None:
        """Changes the experts of the slots. All ranks of the group must do so between the same two steps."""
        assert sorted(experts) == list(range(len(experts))), experts
        self.experts = tuple(experts)
        self._expert_of_slot = torch.tensor(experts)
        self._slot_of_expert = torch.argsort(self._expert_of_slot)

    @property
    def local_experts(self) -> tuple[int, ...]:
        """The logical expert of each slot of this rank."""
        num_local = len(self.experts) // self._num_ranks
        return self.experts[num_local * self._rank : num_local * (self._rank + 1)]

    def routed(self, probs_tE: torch.Tensor, routing_map_tE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Probabilities and routing map of experts, [t, E] each, by slot."""
        if self._expert_of_slot.device != probs_tE.device:
            self._expert_of_slot = self._expert_of_slot.to(probs_tE.device)
            self._slot_of_expert = self._slot_of_expert.to(probs_tE.device)
        probs = _PermutedColumns.apply(probs_tE, self._expert_of_slot, self._slot_of_expert)
        return probs, routing_map_tE.index_select(1, self._expert_of_slot)


class _PermutedColumns(torch.autograd.Function):
    """Columns in another order; the gradient's go back by the inverse, without the sums of an index' own gradient."""

    @staticmethod
    def forward(ctx: Any, columns: torch.Tensor, index: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        return columns.index_select(1, index)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grad.index_select(1, inverse), None, None
