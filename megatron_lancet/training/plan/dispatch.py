"""The dispatch of a plan, ``--lancet-dispatch``: which dispatches a run allows, and why not others."""

import argparse

from megatron_lancet.config import LancetConfig
from megatron_lancet.errors import UsageError
from megatron_lancet.planning.dispatch import nodes_of_group
from megatron_lancet.planning.search.search_space import Exclusion
from megatron_lancet.schedule.dispatch import PLAIN, Dispatch
from megatron_lancet.schedule.layout import Blocker, Layout
from megatron_lancet.schedule.nodes import Nodes
from megatron_lancet.training.platform.launcher import FLAG as NODES_FLAG
from megatron_lancet.training.platform.launcher import ranks_per_node

FLAG = "--lancet-dispatch"
DEDUPLICATING_DISPATCHER = "flex"
"""Megatron's name for the dispatchers (DeepEP, HybridEP) that send a token once to a rank and once to a node."""
_ASKED = "lancet_dedup_asked"
"""Name among Megatron's arguments: the mapping replaces the type of the dispatcher."""
SOME_NODES = Nodes(2, 2)
"""Stands for nodes that are not known."""


def ask_for_dedup(args: argparse.Namespace) -> None:
    """Notes that Megatron's deduplicating dispatcher was asked for, before the mapping replaces it."""
    setattr(args, _ASKED, True)


def nodes_of(args: argparse.Namespace, config: LancetConfig) -> Nodes | str | None:
    """How a run's expert-parallel groups lie on nodes, or as a clause why not on several; None if that is unknown.

    Args:
        args: Megatron's arguments, validated or not.

    Raises:
        UsageError: the flag for the ranks of a node does not divide the number of ranks.
    """
    per_node = ranks_per_node(args, config)
    if per_node is None:
        return None
    return nodes_of_group(args.expert_model_parallel_size, _expert_tp_size(args), per_node)


def dispatch_blocker(args: argparse.Namespace, config: LancetConfig, dispatch: Dispatch) -> Blocker | None:
    """Why a run can't have a dispatch; None if it can.

    Args:
        args: Megatron's arguments, validated or not.

    Raises:
        UsageError: the flag for the ranks of a node does not divide the number of ranks.
    """
    return dispatch.blocker(layout_of(args, config, nodes_of(args, config) if dispatch.needs_nodes else None))


def refusal_of(args: argparse.Namespace, config: LancetConfig, dispatch: Dispatch, instead: str) -> str | None:
    """Why a run can't follow a wish for a dispatch, with what to do, as the end of a message; None if it can.

    Args:
        instead: what to do otherwise, as an imperative.

    Raises:
        UsageError: the flag for the ranks of a node does not divide the number of ranks.
    """
    blocker = dispatch_blocker(args, config, dispatch)
    if blocker is None:
        return None
    if dispatch.blocker(layout_of(args, config, SOME_NODES)) is None:
        return (
            f"{blocker.reason}. Pass {NODES_FLAG} N, the number of ranks that are started on each node, or {instead}."
        )
    return f"{blocker.reason}. {instead[0].upper()}{instead[1:]}."


def allowed_dispatches(args: argparse.Namespace, config: LancetConfig) -> tuple[tuple[Dispatch, ...], list[Exclusion]]:
    """Dispatches that a planner may choose, and the reasons against the others.

    Args:
        args: Megatron's arguments, after the mapping of its flags.

    Raises:
        UsageError: the user asks for a dispatch that the run can't have.
    """
    if config.dispatch is not None:
        refusal = refusal_of(args, config, config.dispatch, f"drop the flag, or pass {FLAG} {PLAIN}")
        if refusal is not None:
            raise UsageError(f"{FLAG} {config.dispatch} is not possible: {refusal}")
        return (config.dispatch,), []
    blockers = {dispatch: dispatch_blocker(args, config, dispatch) for dispatch in Dispatch.known().values()}
    excluded = [
        Exclusion(f"dispatch={dispatch}", blocker.reason, blocker.is_evident)
        for dispatch, blocker in blockers.items()
        if blocker is not None and _is_worth_telling(args, config, dispatch)
    ]
    possible = [one for one, blocker in blockers.items() if blocker is None]
    if getattr(args, _ASKED, False) and any(not one.is_plain and not one.needs_nodes for one in possible):
        possible.remove(PLAIN)
    return tuple(possible), excluded


def dispatch_of_fixed_plan(args: argparse.Namespace, config: LancetConfig) -> tuple[Dispatch, list[str]]:
    """The dispatch of a plan that is made without measurements, and a note if it is not the requested one.

    Args:
        args: Megatron's arguments, after the mapping of its flags.

    Raises:
        UsageError: the user asks for a dispatch that the run can't have.
    """
    allowed, _ = allowed_dispatches(args, config)
    if config.dispatch is not None:
        return config.dispatch, []
    if not getattr(args, _ASKED, False):
        return PLAIN, []
    for dispatch in reversed(allowed):
        if not dispatch.is_plain and all(feature.allows(dispatch, config) for feature in config.features):
            return dispatch, []
    others = (dispatch_blocker(args, config, one) for one in Dispatch.known().values())
    return PLAIN, [f"dispatch is plain, because {blocker.reason}" for blocker in others if blocker is not None][:1]


def rows_in_words(args: argparse.Namespace, config: LancetConfig) -> str:
    """The dispatch of a run with Megatron's deduplicating dispatcher.

    Args:
        args: Megatron's arguments, validated or not.

    Raises:
        UsageError: the flag for the ranks of a node does not divide the number of ranks.
    """
    saving = (one for one in Dispatch.known().values() if not one.is_plain)
    possible = [one.receiver for one in saving if dispatch_blocker(args, config, one) is None]
    return f"one row per token and {' or '.join(possible or [PLAIN.receiver])}"


def layout_of(args: argparse.Namespace, config: LancetConfig, nodes: Nodes | str | None) -> Layout:
    """The model of a run on its ranks.

    Args:
        args: Megatron's arguments, validated or not.
        nodes: how its expert-parallel groups lie on nodes, see :func:`nodes_of`.
    """
    return Layout(
        args.expert_model_parallel_size,
        args.num_experts or 0,
        args.moe_router_topk,
        args.moe_pad_expert_input_to_capacity,
        nodes,
        is_quantized=bool(args.fp8 or args.fp4),
    )


def _expert_tp_size(args: argparse.Namespace) -> int:
    return int(args.expert_tensor_parallel_size or args.tensor_model_parallel_size)


def _is_worth_telling(args: argparse.Namespace, config: LancetConfig, dispatch: Dispatch) -> bool:
    """Whether a user should be told why a dispatch is excluded.

    Where nodes are unknown, as in a dry run, the dry run has a line of its own.
    """
    if not dispatch.needs_nodes:
        return True
    per_node = ranks_per_node(args, config)
    if per_node in (None, 1):
        return False
    group_size = args.expert_model_parallel_size * _expert_tp_size(args)
    is_inside = group_size <= per_node and per_node % group_size == 0
    return args.moe_router_topk > 1 and not is_inside
