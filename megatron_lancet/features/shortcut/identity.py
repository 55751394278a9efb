"""Identity experts: a token that chooses one is added to its output by the expert's weight, and is not sent.

A router with N experts and Z of these has N + Z rows, the last Z for them. Legend of shapes: s positions, b samples, t
= s * b tokens, E = N + Z, H hidden size.
"""

import copy
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from megatron_lancet.model.adopt import adopt
from megatron_lancet.model.ops import ChunkState
from megatron_lancet.model.overlapping_moe import ForwardOp, OverlappingMoE
from megatron_lancet.model.routing.router import ChunkedTopKRouter


class _RoutesToItself(TopKRouter):
    """A router with identity experts.

    Attributes:
        num_sent_to: N.
    """

    num_sent_to: int
    _own_t: torch.Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns probabilities and routing map of the other experts, [t, N]."""
        probs_tE, map_tE = super().forward(*args, **kwargs)
        self._own_t = probs_tE[:, self.num_sent_to :].sum(1)
        return probs_tE[:, : self.num_sent_to].contiguous(), map_tE[:, : self.num_sent_to].contiguous()

    def take_own(self, hidden_sbH: torch.Tensor) -> torch.Tensor:
        """The identity experts' part of the output of the tokens that were routed last, [s, b, H]."""
        assert self._own_t is not None
        weights_t, self._own_t = self._own_t, None
        return (hidden_sbH * weights_t.view(*hidden_sbH.shape[:2], 1)).to(hidden_sbH.dtype)


class RouterToItself(_RoutesToItself, TopKRouter):
    """Megatron's router with identity experts."""


class ChunkedRouterToItself(_RoutesToItself, ChunkedTopKRouter):
    """The same for chunks."""


_ROUTERS: dict[type, type[_RoutesToItself]] = {
    TopKRouter: RouterToItself,
    ChunkedTopKRouter: ChunkedRouterToItself,
}


class FewerRowsDispatcher(MoEAlltoAllTokenDispatcher):
    """Megatron's dispatcher where a token may have fewer experts than the router chooses."""

    def preprocess(self, routing_map: torch.Tensor) -> torch.Tensor:
        """Counts the rows, of which Megatron expects the same number for each token."""
        rows_per_expert: torch.Tensor = super().preprocess(routing_map)
        self.num_out_tokens = int(routing_map.sum())
        return rows_per_expert


def add_identity_experts(moe: Any, number: int) -> None:
    """Gives a layer identity experts, before DDP wraps it; the router's weight gets rows for them.

    Args:
        moe: Megatron's MoE layer, in the overlapping block or not.
        number: Z.
    """
    router = moe.router
    router.num_sent_to = router.config.num_moe_experts
    router.config = copy.copy(router.config)
    router.config.num_moe_experts += number
    router.num_experts = router.config.num_moe_experts
    stock = router.weight
    rows = torch.empty(router.num_experts, stock.size(1), dtype=torch.float32, device=stock.device)
    if router.config.perform_initialization:
        router.config.init_method(rows)
    router.weight = torch.nn.Parameter(rows.to(stock.dtype))
    for name, value in vars(stock).items():
        setattr(router.weight, name, value)
    adopt(router, _ROUTERS[type(router)])
    moe.token_dispatcher.__class__ = FewerRowsDispatcher


def has_identity_experts(moe: Any) -> bool:
    """Whether a layer of Megatron has identity experts."""
    return isinstance(moe.router, _RoutesToItself)


def route(before: ForwardOp, moe: OverlappingMoE, x: ChunkState) -> None:
    """Choose the experts of each token, and keep what identity experts add."""
    if not has_identity_experts(moe.stock):
        before(moe, x)
        return
    own_sbH = x.normed_sbH.view_as(x.normed_sbH)  # its gradient is added last, as by Megatron's modules
    before(moe, x)
    with x.norm.consumed():
        x.unsent_sbH = moe.stock.router.take_own(own_sbH)


def postprocess(before: ForwardOp, moe: OverlappingMoE, x: ChunkState) -> None:
    """Sum the outputs of each token's experts."""
    before(moe, x)
    if has_identity_experts(moe.stock):
        x.output_sbH = x.output_sbH + x.unsent_sbH
        del x.unsent_sbH
