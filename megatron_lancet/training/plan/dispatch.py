"""What a plan's all-to-alls carry, and in how many parts: ``--lancet-dispatch`` and ``--lancet-tiles``.

Which of the three dispatches a run allows, whether it allows tiles, and why not.
"""

import argparse
from collections.abc import Iterator

from megatron_lancet.config import LancetConfig
from megatron_lancet.errors import UsageError
from megatron_lancet.model.tiles.support import Unsupported, tiles_unsupported
from megatron_lancet.planning.dispatch import is_evident, why_not_dedup, why_not_two_hop
from megatron_lancet.planning.search.search_space import Exclusion
from megatron_lancet.schedule.nodes import Nodes, nodes_of_group
from megatron_lancet.schedule.plan import Dispatch, Plan
from megatron_lancet.training.platform.launcher import FLAG as NODES_FLAG
from megatron_lancet.training.platform.launcher import ranks_per_node

FLAG = "--lancet-dispatch"
TILES_FLAG = "--lancet-tiles"
DEDUPLICATING_DISPATCHER = "flex"
"""Megatron's name for the dispatchers (DeepEP, HybridEP) that send a token once to a rank and once to a node."""
_ASKED = "lancet_dedup_asked"
"""Name among Megatron's arguments: the mapping replaces the type of the dispatcher."""
_SOME_NODES = Nodes(2, 2)


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
    return nodes_of_group(args.expert_model_parallel_size, _num_holders(args), per_node)


def dispatch_blocker(args: argparse.Namespace, config: LancetConfig, dispatch: Dispatch) -> str | None:
    """Why a run can't have a dispatch, as a clause; None if it can.

    Chunks, ranges, pairing, recompute, precision, dropped tokens and all other parallelism work with each of them.

    Args:
        args: Megatron's arguments, validated or not.

    Raises:
        UsageError: the flag for the ranks of a node does not divide the number of ranks.
    """
    if dispatch is Dispatch.TWO_HOP:
        return _why_not_two_hop(args, nodes_of(args, config))
    return why_not_dedup(*_model(args)) if dispatch is Dispatch.DEDUP else None


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
    if dispatch is Dispatch.TWO_HOP and _why_not_two_hop(args, _SOME_NODES) is None:
        return f"{blocker}. Pass {NODES_FLAG} N, the number of ranks that are started on each node, or {instead}."
    return f"{blocker}. {instead[0].upper()}{instead[1:]}."


def allowed_dispatches(args: argparse.Namespace, config: LancetConfig) -> tuple[tuple[Dispatch, ...], list[Exclusion]]:
    """What a planner may let all-to-alls carry, and why the run excludes the other dispatches if it does.

    Args:
        args: Megatron's arguments, after the mapping of its flags.

    Raises:
        UsageError: the user asks for a dispatch that the run can't have.
    """
    if config.dispatch is not None:
        refusal = refusal_of(args, config, config.dispatch, f"drop the flag, or pass {FLAG} plain")
        if refusal is not None:
            raise UsageError(f"{FLAG} {config.dispatch} can't be followed: {refusal}")
        return (config.dispatch,), []
    blockers = {dispatch: dispatch_blocker(args, config, dispatch) for dispatch in Dispatch}
    excluded = [
        Exclusion(f"dispatch={dispatch}", blocker, is_evident(dispatch, _SOME_NODES, *_model(args)[:3]))
        for dispatch, blocker in blockers.items()
        if blocker is not None and _is_worth_telling(args, config, dispatch)
    ]
    is_asked = getattr(args, _ASKED, False) and blockers[Dispatch.DEDUP] is None
    possible = (one for one, blocker in blockers.items() if blocker is None)
    return tuple(one for one in possible if one is not Dispatch.PLAIN or not is_asked), excluded


def dispatch_of_fixed_plan(args: argparse.Namespace, config: LancetConfig) -> tuple[Dispatch, list[str]]:
    """What the all-to-alls of a plan that is made without measurements carry, and a note if less was asked for.

    Args:
        args: Megatron's arguments, after the mapping of its flags.

    Raises:
        UsageError: the user asks for a dispatch that the run can't have.
    """
    allowed, _ = allowed_dispatches(args, config)
    if config.dispatch is not None:
        return config.dispatch, []
    if not getattr(args, _ASKED, False):
        return Dispatch.PLAIN, []
    for dispatch in (Dispatch.TWO_HOP, Dispatch.DEDUP):
        if dispatch in allowed and not (dispatch is Dispatch.TWO_HOP and config.tiles):
            return dispatch, []
    return Dispatch.PLAIN, [f"dispatch is plain, because {dispatch_blocker(args, config, Dispatch.DEDUP)}"]


def tiles_blockers(args: argparse.Namespace, config: LancetConfig) -> Iterator[Unsupported]:
    """Yields why the rows of a run can't go to other ranks in tiles.

    Args:
        args: Megatron's arguments, validated or not.
    """
    if args.expert_model_parallel_size <= 1:
        yield Unsupported("there is one expert-parallel rank, so nothing is sent", "raise --expert-model-parallel-size")
    if config.dispatch is Dispatch.TWO_HOP:
        yield Unsupported(f"the messages of {FLAG} {Dispatch.TWO_HOP} have no tiles", f"drop {FLAG}")
    found = tiles_unsupported(bool(args.fp8 or args.fp4), config.max_received_rows is not None)
    if found is not None:
        yield found


def allowed_tiles(args: argparse.Namespace, config: LancetConfig) -> tuple[tuple[int, ...] | None, list[Exclusion]]:
    """Numbers of tiles that a planner may choose, and why the run excludes others; None for those that are profiled.

    Args:
        args: Megatron's arguments, validated or not.

    Raises:
        UsageError: the user asks for tiles, and the run can't have any.
    """
    blocker = next(tiles_blockers(args, config), None)
    if config.tiles and blocker is not None:
        raise UsageError(
            f"{TILES_FLAG} {config.tiles} can't be followed: {blocker.reason}. Pass {TILES_FLAG} 0, or "
            f"{blocker.advice}."
        )
    if config.tiles is not None:
        return (config.tiles,), []
    return (None, []) if blocker is None else ((0,), [Exclusion("tiles", blocker.reason, is_evident=True)])


def tiles_of_fixed_plan(args: argparse.Namespace, config: LancetConfig) -> int:
    """The number of tiles of a plan that is made without measurements.

    Args:
        args: Megatron's arguments, validated or not.

    Raises:
        UsageError: the user asks for tiles, and the run can't have any.
    """
    allowed_tiles(args, config)
    return config.tiles or 0


def rows_in_words(args: argparse.Namespace, config: LancetConfig) -> str:
    """Which rows a run sends that asks for Megatron's deduplicating dispatcher.

    Args:
        args: Megatron's arguments, validated or not.

    Raises:
        UsageError: the flag for the ranks of a node does not divide the number of ranks.
    """
    names = {Dispatch.DEDUP: "rank", Dispatch.TWO_HOP: "node"}
    possible = [name for dispatch, name in names.items() if dispatch_blocker(args, config, dispatch) is None]
    return f"one row per token and {' or '.join(possible or ['expert'])}"


def nodes_to_connect(args: argparse.Namespace, config: LancetConfig, plan: Plan, may_change: bool) -> Nodes | None:
    """The nodes between which a run makes connections for two hops; None if no plan of the run can have them.

    Args:
        args: Megatron's arguments, validated.
        plan: the run's plan, or the fallback of one that finds its plan.
        may_change: whether the run finds its plan, or profiles for one.
    """
    may_hop = plan.dispatch is Dispatch.TWO_HOP
    if may_change and not may_hop:
        may_hop = Dispatch.TWO_HOP in allowed_dispatches(args, config)[0]
    nodes = nodes_of(args, config) if may_hop else None
    assert nodes is None or isinstance(nodes, Nodes), nodes
    return nodes


def unknown_nodes_note(args: argparse.Namespace, config: LancetConfig) -> str | None:
    """What to say of two hops where nothing tells which ranks share a node; None if that makes no difference."""
    if config.dispatch is not None or nodes_of(args, config) is not None:
        return None
    if _why_not_two_hop(args, _SOME_NODES) is not None:
        return None
    return f"not dispatch={Dispatch.TWO_HOP}: {_why_not_two_hop(args, None)} ({NODES_FLAG} says it)"


def _model(args: argparse.Namespace) -> tuple[int, int, int, bool]:
    return (
        args.expert_model_parallel_size,
        args.num_experts or 0,
        args.moe_router_topk,
        args.moe_pad_expert_input_to_capacity,
    )


def _num_holders(args: argparse.Namespace) -> int:
    return int(args.expert_tensor_parallel_size or args.tensor_model_parallel_size)


def _why_not_two_hop(args: argparse.Namespace, nodes: Nodes | str | None) -> str | None:
    return why_not_two_hop(nodes, *_model(args))


def _is_worth_telling(args: argparse.Namespace, config: LancetConfig, dispatch: Dispatch) -> bool:
    """Whether the reason against a dispatch is more than that a token has one expert, or that nothing leaves a node.

    Where nodes are unknown, as in a dry run, see :func:`unknown_nodes_note`.
    """
    if dispatch is not Dispatch.TWO_HOP:
        return True
    per_node = ranks_per_node(args, config)
    if per_node in (None, 1):
        return False
    group_size = args.expert_model_parallel_size * _num_holders(args)
    is_inside = group_size <= per_node and per_node % group_size == 0
    return args.moe_router_topk > 1 and not is_inside
