"""A loss that draws tokens to the experts of their own node: LocMoE (arXiv 2401.13920), the loss without its gate.

The paper's loss is mu * KL(D_c || D_l): D_c is the present distribution of tokens over experts, D_l one that is wholly
local to the node of the tokens' rank. Both are made precise here, on one rank's tokens of one micro-batch:

    D_c(e) = 1 / T * sum over tokens t of s(t, e)
    D_l(e) = (1 - SMOOTHING) / n + SMOOTHING / E    for the n experts of the node
    D_l(e) =                       SMOOTHING / E    for the others
    KL     = sum over experts e of D_c(e) * ln(D_c(e) / D_l(e))

s are the scores that Megatron's balancing losses use: a token's probabilities over all experts, with sum 1 (softmax, or
normalised sigmoid). D_l is never zero, so the loss and its gradient are finite; it is at most
ln(E / SMOOTHING), when no probability is local. The gradient is

    d loss / d s(t, e) = mu / T * (ln(D_c(e) / D_l(e)) + 1)

so that, unlike the balancing losses, it needs no routing map: a token is drawn to its node whatever it has chosen.

Legend of shapes: T tokens of a rank in a micro-batch, E experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from megatron_lancet.schedule.nodes import Nodes

FLAG = "--lancet-locality-loss-coeff"
SMOOTHING = 0.01
"""Share of the local distribution that is spread evenly over all experts."""
LOSS_NAME = "locality_loss"
"""In Megatron's log, where it is shown like the balancing losses: the divergence, without its coefficient."""


@dataclass(frozen=True)
class LocalityLoss:
    """The loss of the routers of a model.

    Attributes:
        coeff: mu.
        nodes: how the ranks that share the experts lie on nodes.
    """

    coeff: float
    nodes: Nodes

    def of_rank(self, rank: int, num_experts: int) -> "RankLocality":
        """The loss of one rank's tokens.

        Args:
            rank: place in the expert-parallel group.
            num_experts: E.
        """
        per_node = num_experts // self.nodes.num_nodes
        first = rank // self.nodes.ranks_per_node * per_node
        return RankLocality(self.coeff, tuple(range(first, first + per_node)), num_experts)


@dataclass(frozen=True)
class RankLocality:
    """The loss of one rank's tokens, a :class:`~megatron_lancet.model.routing.router.RouterLoss`.

    Attributes:
        coeff: mu.
        local_experts: numbers of the experts on the rank's node, where Megatron has placed them.
        num_experts: E.
    """

    name: ClassVar[str] = LOSS_NAME
    flag: ClassVar[str] = FLAG
    coeff: float
    local_experts: tuple[int, ...]
    num_experts: int

    def at_slots_of(self, experts: Sequence[int]) -> "RankLocality":
        """The same loss where experts are on other ranks.

        Args:
            experts: the expert of each slot.
        """
        return replace(self, local_experts=tuple(experts[slot] for slot in self.local_experts))

    def local_distribution(self, like: torch.Tensor) -> torch.Tensor:
        """D_l, [E], with the type and the device of a tensor."""
        shares = torch.full((self.num_experts,), SMOOTHING / self.num_experts, dtype=like.dtype, device=like.device)
        shares[list(self.local_experts)] += (1 - SMOOTHING) / len(self.local_experts)
        return shares

    def __call__(self, scores_TE: torch.Tensor) -> torch.Tensor:
        """Returns mu * KL(D_c || D_l), a scalar that is differentiable in the scores.

        Args:
            scores_TE: probabilities of each token over all experts, each row with sum 1.
        """
        present_E = scores_TE.mean(dim=0)
        local_E = self.local_distribution(present_E)
        # An expert of which no token has any probability adds 0, with a finite gradient.
        least = torch.finfo(present_E.dtype).tiny
        return self.coeff * (present_E * (present_E.clamp_min(least).log() - local_E.log())).sum()
