"""``--lancet-locality-loss-coeff``: whether a run can have the loss of ``loss.py``, and its log."""

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from megatron_lancet.config import LancetConfig
from megatron_lancet.errors import UsageError
from megatron_lancet.feature import ActiveFeature, Feature, RunFacts
from megatron_lancet.features.locality.loss import FLAG, LOSS_NAME, LocalityLoss
from megatron_lancet.flags import CheckedFlags, flag
from megatron_lancet.model.gpt import LanguageModel
from megatron_lancet.model.routing.router import ChunkedTopKRouter
from megatron_lancet.runtime.comm import Comm
from megatron_lancet.schedule.nodes import Nodes, nodes_of_group
from megatron_lancet.schedule.plan import Plan
from megatron_lancet.training.megatron.patches import logged_losses
from megatron_lancet.training.platform.launcher import FLAG as NODES_FLAG
from megatron_lancet.training.platform.launcher import ranks_per_node
from megatron_lancet.training.run import Run


@dataclass(frozen=True)
class LocalityFlags(CheckedFlags):
    """Weight of the loss."""

    locality_loss_coeff: float = flag(
        0.0,
        parsed_as=float,
        at_least=0,
        metavar="MU",
        advice="0 is no such loss.",
        help="coefficient of a loss that favors the experts of a token's own node (LocMoE): the divergence of a "
        "rank's probabilities over experts from the node's own experts, added to Megatron's balancing losses. It "
        "changes the trained model. Default: 0, no such loss.",
    )


class Locality(Feature):
    """``--lancet-locality-loss-coeff``."""

    name = "locality"
    flags = LocalityFlags

    def needs_plan(self, config: LancetConfig) -> bool:
        """Whether there is a loss."""
        return config.of(LocalityFlags).locality_loss_coeff > 0

    def check(self, facts: RunFacts) -> None:
        """Refuses a loss that the run can't have."""
        choose_locality(facts.args, facts.config, facts.plan)

    def note(self, facts: RunFacts) -> str:
        """Says that the model trains with another loss."""
        return locality_note(choose_locality(facts.args, facts.config, facts.plan))

    def start(self, run: Run) -> "ActiveLocality | None":
        """Gives the loss to the run's routers."""
        locality = choose_locality(run.facts.args, run.config, run.facts.plan)
        return None if locality is None else ActiveLocality(locality)


class ActiveLocality(ActiveFeature):
    """The loss in a run."""

    def __init__(self, locality: LocalityLoss) -> None:
        self._locality = locality

    def enter(self, stack: ExitStack) -> None:
        """Lets Megatron log the loss."""
        stack.enter_context(logged_losses([LOSS_NAME]))

    def adopt(self, stages: Sequence[LanguageModel], comm: Comm) -> None:
        """Gives the loss to the routers."""
        for stage in stages:
            for module in stage.modules():
                if isinstance(module, ChunkedTopKRouter):
                    module.add_loss(self._locality.of_rank(comm.own_rank, module.num_experts))


def choose_locality(args: argparse.Namespace, config: LancetConfig, plan: Plan | None) -> LocalityLoss | None:
    """Returns the locality loss of the run's routers; None without one.

    Args:
        args: Megatron's arguments, validated.
        plan: None for stock modules.

    Raises:
        UsageError: a coefficient is given to a run that can't have the loss.
    """
    coeff = config.of(LocalityFlags).locality_loss_coeff
    if coeff == 0:
        return None
    given = f"{FLAG} {coeff:g}"
    if args.expert_model_parallel_size == 1:
        raise UsageError(
            f"{given} favors experts on a token's own node, but --expert-model-parallel-size is 1 and every rank "
            "has all experts. Drop the flag."
        )
    if plan is None:
        raise UsageError(
            f"{given} is a loss of the overlapping block's routers, but this run has stock Megatron modules. Drop it, "
            "or --lancet-plan off."
        )
    per_node = ranks_per_node(args, config)
    if per_node is None:
        raise UsageError(
            f"{given} favors experts on a token's own node, but it is not known which ranks share a node. Pass "
            f"{NODES_FLAG} N, the number of ranks that are started on each node, or drop the flag."
        )
    nodes = _nodes(args, per_node)
    if isinstance(nodes, str):
        raise UsageError(f"{given} favors experts on a token's own node, but {nodes}. Drop the flag.")
    return LocalityLoss(coeff, nodes)


def _nodes(args: argparse.Namespace, per_node: int) -> Nodes | str:
    """As for two hops, but a node may have one rank, which then holds all experts of the node."""
    expert_tp_size = int(args.expert_tensor_parallel_size or args.tensor_model_parallel_size)
    if per_node == expert_tp_size == 1:
        return Nodes(args.expert_model_parallel_size, 1)
    return nodes_of_group(args.expert_model_parallel_size, expert_tp_size, per_node)


def locality_note(locality: LocalityLoss | None) -> str:
    """The loss's part of the plan's line; empty without one."""
    if locality is None:
        return ""
    return f"; locality loss {locality.coeff:g} on {locality.nodes}: the model trains with another loss than stock's"


LOCALITY = Locality()
