"""What a plan's all-to-alls carry, ``--lancet-dispatch``: a row per token and expert, or one per token and rank."""

import argparse

from megatron_lancet.config import LancetConfig
from megatron_lancet.errors import UsageError
from megatron_lancet.planning.dispatch import why_not_dedup
from megatron_lancet.planning.search.search_space import Exclusion
from megatron_lancet.schedule.plan import Dispatch

FLAG = "--lancet-dispatch"
DEDUPLICATING_DISPATCHER = "flex"
"""Megatron's name for the dispatchers (DeepEP, HybridEP) that send a token once to a rank and once to a node."""
_ASKED = "lancet_dedup_asked"
"""Name among Megatron's arguments: the mapping replaces the type of the dispatcher."""


def ask_for_dedup(args: argparse.Namespace) -> None:
    """Notes that Megatron's deduplicating dispatcher was asked for, before the mapping replaces it."""
    setattr(args, _ASKED, True)


def dedup_blocker(args: argparse.Namespace) -> str | None:
    """Why a run can't deduplicate what it dispatches, as a clause; None if it can.

    Chunks, ranges, pairing, recompute, precision, dropped tokens and all other parallelism work with it.

    Args:
        args: Megatron's arguments, validated or not.
    """
    return why_not_dedup(
        args.expert_model_parallel_size,
        args.num_experts or 0,
        args.moe_router_topk,
        args.moe_pad_expert_input_to_capacity,
    )


def allowed_dispatches(args: argparse.Namespace, config: LancetConfig) -> tuple[tuple[Dispatch, ...], list[Exclusion]]:
    """What a planner may let all-to-alls carry, and why the run excludes deduplication if it does.

    Args:
        args: Megatron's arguments, after the mapping of its flags.

    Raises:
        UsageError: the user asks for deduplication, and the run can't deduplicate.
    """
    if config.dispatch is Dispatch.PLAIN:
        return (Dispatch.PLAIN,), []
    blocker = dedup_blocker(args)
    if config.dispatch is Dispatch.DEDUP:
        if blocker is not None:
            raise UsageError(f"{FLAG} dedup can't be followed: {blocker}. Drop the flag, or pass {FLAG} plain.")
        return (Dispatch.DEDUP,), []
    if blocker is not None:
        return (Dispatch.PLAIN,), [Exclusion(f"dispatch={Dispatch.DEDUP}", blocker)]
    return ((Dispatch.DEDUP,) if getattr(args, _ASKED, False) else tuple(Dispatch)), []


def dispatch_of_fixed_plan(args: argparse.Namespace, config: LancetConfig) -> tuple[Dispatch, list[str]]:
    """What the all-to-alls of a plan that is made without measurements carry, and a note if less was asked for.

    Args:
        args: Megatron's arguments, after the mapping of its flags.

    Raises:
        UsageError: the user asks for deduplication, and the run can't deduplicate.
    """
    allowed, excluded = allowed_dispatches(args, config)
    was_asked = getattr(args, _ASKED, False)
    notes = [f"dispatch is plain, because {exclusion.reason}" for exclusion in excluded if was_asked]
    return (Dispatch.PLAIN if Dispatch.PLAIN in allowed else Dispatch.DEDUP), notes
