"""Makes a fresh router send the wanted share of rows to each expert, by Megatron's own expert bias; counts rows."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.moe.moe_layer import MoELayer

_ROUNDS = 400
_FIRST_STEP = 0.1
_DECAY = 0.97
_CLOSE_ENOUGH = 0.01
"""Of an expert's rows; nearer to the wanted number, the wider margin wins."""


def bias_for_shares(scores_TE: torch.Tensor, topk: int, shares: list[float]) -> torch.Tensor:
    """The bias [E] with which each expert is among the top k of its share of tokens.

    Megatron's update rule (the bias of an expert with too few rows grows by a fixed step), with a step that shrinks.
    Among biases that do, the one by which the closest token prefers its experts most clearly: variants sum in
    different orders, and no token must change its expert over that.

    Args:
        scores_TE: scores of all tokens.
        shares: wanted share of the routed rows of each expert.
    """
    num_tokens, num_experts = scores_TE.shape
    wanted_E = torch.tensor(shares) * num_tokens * topk
    bias_E = best_E = torch.zeros(num_experts)
    best = (float("inf"), 0.0)
    step = _FIRST_STEP
    for _ in range(_ROUNDS):
        top = (scores_TE + bias_E).topk(topk + 1, dim=1)
        missing_E = wanted_E - torch.bincount(top.indices[:, :topk].flatten(), minlength=num_experts)
        off = (missing_E.abs() / wanted_E).max().item()
        margin = (top.values[:, -2] - top.values[:, -1]).min().item()
        candidate = (max(off, _CLOSE_ENOUGH), -margin)
        if candidate < best:
            best, best_E = candidate, bias_E
        bias_E = bias_E + step * missing_E.sign()
        step *= _DECAY
    return best_E


def set_expert_shares(model: GPTModel, forward: Callable[[], object], shares: list[float]) -> None:
    """Set the expert bias of every router of ``model``, in place, layer by layer in one pass. Collective.

    Args:
        forward: runs the model on the micro-batch that is going to be measured.
        shares: wanted share of the routed rows of each expert, over all ranks.
    """

    def before_router(router: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        scores_TE = torch.sigmoid(router.gating(inputs[0]).float()).flatten(0, 1)
        everywhere = [torch.empty_like(scores_TE) for _ in range(dist.get_world_size())]
        dist.all_gather(everywhere, scores_TE)
        router.expert_bias.copy_(bias_for_shares(torch.cat(everywhere), router.topk, shares))

    handles = [router.register_forward_pre_hook(before_router) for router in _routers(model)]
    try:
        with torch.no_grad():
            forward()
    finally:
        for handle in handles:
            handle.remove()


def _routers(model: GPTModel) -> list[Any]:
    return [layer.mlp.router for layer in model.decoder.layers if isinstance(layer.mlp, MoELayer)]


def take_expert_shares(model: GPTModel) -> list[list[float]]:
    """Per layer, the share of routed rows that each expert got since the last call, over all ranks. Collective."""
    shares = []
    for router in _routers(model):
        rows_E = router.local_tokens_per_expert
        total_E = rows_E.clone()
        dist.all_reduce(total_E)
        shares.append((total_E / total_E.sum()).tolist())
        rows_E.zero_()
    return shares


@dataclass(frozen=True)
class SentRows:
    """What the routing sends to other nodes in the dispatches of one step, over all layers and ranks.

    Attributes:
        tokens: that were routed; each once in each layer.
        plain: rows to experts of other nodes, one per token and expert.
        dedup: rows to ranks of other nodes, one per token and rank that holds any of its experts.
        two_hop: rows to other nodes, one per token and node that has any of its experts.
    """

    tokens: int
    plain: int
    dedup: int
    two_hop: int


def sent_rows(routing_map_TE: torch.Tensor, rank: int, num_ranks: int, ranks_per_node: int = 1) -> torch.Tensor:
    """The fields of :class:`SentRows`, int64 [4], of what one router chose on one rank.

    Args:
        routing_map_TE: bool; the experts are spread over the ranks in order.
        rank: whose tokens these are.
        ranks_per_node: ranks lie on nodes in order.
    """
    rows_TNL = routing_map_TE.unflatten(1, (num_ranks // ranks_per_node, ranks_per_node, -1)).sum(dim=3)
    rows_TNL[:, rank // ranks_per_node] = 0
    goes_TNL = rows_TNL > 0
    return torch.stack([torch.tensor(len(rows_TNL)), rows_TNL.sum(), goes_TNL.sum(), goes_TNL.any(dim=2).sum()])


def count_sent_rows(model: GPTModel, ranks_per_node: int, run: Callable[[], object]) -> SentRows:
    """What the routers of a stock ``model`` send to other nodes while ``run`` runs. Collective over the world.

    Args:
        run: runs steps of the model, forward passes on this thread.
    """
    total = torch.zeros(4, dtype=torch.int64)

    def after_router(_router: Any, _inputs: Any, outputs: tuple[torch.Tensor, torch.Tensor]) -> None:
        total.add_(sent_rows(outputs[1], dist.get_rank(), dist.get_world_size(), ranks_per_node))

    handles = [router.register_forward_hook(after_router) for router in _routers(model)]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    dist.all_reduce(total)
    return SentRows(*total.tolist())
