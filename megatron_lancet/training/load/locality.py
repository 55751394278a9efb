"""``--lancet-locality-loss-coeff``: whether a run can have the loss of ``model/routing/locality.py``, and its log."""

import argparse

import torch

from megatron_lancet.config import LancetConfig
from megatron_lancet.errors import UsageError
from megatron_lancet.model.routing.locality import LocalityLoss
from megatron_lancet.model.routing.router import ChunkedTopKRouter
from megatron_lancet.schedule.nodes import Nodes, nodes_of_group
from megatron_lancet.schedule.plan import Plan
from megatron_lancet.training.platform.launcher import FLAG as NODES_FLAG
from megatron_lancet.training.platform.launcher import ranks_per_node

FLAG = "--lancet-locality-loss-coeff"


def choose_locality(args: argparse.Namespace, config: LancetConfig, plan: Plan | None) -> LocalityLoss | None:
    """Returns the locality loss of the run's routers; None without one.

    Args:
        args: Megatron's arguments, validated.
        plan: None for stock modules.

    Raises:
        UsageError: a coefficient is given to a run that can't have the loss.
    """
    if config.locality_loss_coeff == 0:
        return None
    flag = f"{FLAG} {config.locality_loss_coeff:g}"
    if args.expert_model_parallel_size == 1:
        raise UsageError(
            f"{flag} draws tokens to the experts of their node, but --expert-model-parallel-size is 1 and every rank "
            "has all experts. Drop the flag."
        )
    if plan is None:
        raise UsageError(
            f"{flag} is a loss of the overlapping block's routers, but this run has stock Megatron modules. Drop it, "
            "or --lancet-plan off."
        )
    per_node = ranks_per_node(args, config)
    if per_node is None:
        raise UsageError(
            f"{flag} draws tokens to the experts of their node, but it is not known which ranks share a node. Pass "
            f"{NODES_FLAG} N, the number of ranks that are started on each node, or drop the flag."
        )
    nodes = _nodes(args, per_node)
    if isinstance(nodes, str):
        raise UsageError(f"{flag} draws tokens to the experts of their node, but {nodes}. Drop the flag.")
    return LocalityLoss(config.locality_loss_coeff, nodes)


def _nodes(args: argparse.Namespace, per_node: int) -> Nodes | str:
    """As for two hops, but a node may have one rank: its experts are those of the node."""
    num_holders = int(args.expert_tensor_parallel_size or args.tensor_model_parallel_size)
    if per_node == num_holders == 1:
        return Nodes(args.expert_model_parallel_size, 1)
    return nodes_of_group(args.expert_model_parallel_size, num_holders, per_node)


def locality_note(locality: LocalityLoss | None) -> str:
    """What the plan's line says of the loss; empty without one."""
    if locality is None:
        return ""
    return f"; locality loss {locality.coeff:g} on {locality.nodes}: the model trains with another loss than stock's"


def add_locality_loss(model: torch.nn.Module, locality: LocalityLoss, rank: int) -> None:
    """Gives the loss to the routers of a model that runs a plan.

    Args:
        rank: place in the expert-parallel group.
    """
    for module in model.modules():
        if isinstance(module, ChunkedTopKRouter):
            module.locality = locality.of_rank(rank, module.num_experts)
