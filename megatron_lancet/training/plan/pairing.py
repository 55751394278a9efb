"""Pairing in a run, ``--lancet-pairing``: whether the backward of a micro-batch can be paired with the next forward."""

import argparse
from collections.abc import Iterator

from megatron_lancet.config import LancetConfig, PairingChoice
from megatron_lancet.errors import UsageError
from megatron_lancet.feature import PlanBlocker, PlanPart
from megatron_lancet.planning.search.search_space import Exclusion

FLAG = "--lancet-pairing"
MEGATRONS_FLAG = "--overlap-moe-expert-parallel-comm"
"""Megatron's own pairing, layer by layer. With a plan it asks for ours, see ``flag_mapping.py``."""
_ASKED = "lancet_pairing_asked"
"""Name among Megatron's arguments: the mapping clears the argument of Megatron's flag."""


def ask_for_pairing(args: argparse.Namespace) -> None:
    """Notes that Megatron's flag was given, before it is cleared."""
    setattr(args, _ASKED, True)


def pairing_blockers(args: argparse.Namespace, config: LancetConfig) -> Iterator[PlanBlocker]:
    """Yields the reasons why micro-batches can't be paired.

    Pairing cuts nothing and changes no order of sums, so it works with whatever routing, precision, recompute and
    parallelism a plan works with.

    Args:
        args: Megatron's arguments, validated.
    """
    samples = args.micro_batch_size * args.data_parallel_size
    # With a schedule of batch sizes the first steps may have one micro-batch, and later ones more.
    if args.step_batch_size_schedule is None and args.global_batch_size < 2 * samples:
        yield PlanBlocker(
            f"a step has one micro-batch (--global-batch-size {args.global_batch_size}, --micro-batch-size "
            f"{args.micro_batch_size} on {args.data_parallel_size} data-parallel ranks)",
            "raise --global-batch-size",
        )
    num_stages, is_interleaved = args.pipeline_model_parallel_size, bool(args.virtual_pipeline_model_parallel_size)
    if num_stages > 1 and not is_interleaved:
        yield PlanBlocker(
            "Megatron's loop for a pipeline without virtual stages has no place for a pair, and with one its first "
            f"stage would keep {2 * num_stages} micro-batches in place of {num_stages}",
            "pass --num-virtual-stages-per-pipeline-rank",
        )
    for feature in config.features:
        yield from feature.plan_blockers(PlanPart.PAIRING, args, config)


def allowed_pairing(args: argparse.Namespace, config: LancetConfig) -> tuple[tuple[bool, ...], list[Exclusion]]:
    """Whether a planner may pair: both values or the only one that is allowed, and why the run excludes pairing.

    Args:
        args: Megatron's arguments, validated.

    Raises:
        UsageError: the user asks for pairing, and the run can't pair.
    """
    if config.pairing is PairingChoice.OFF:
        return (False,), []
    blockers = list(pairing_blockers(args, config))
    if config.pairing is PairingChoice.ON:
        for blocker in blockers:
            raise UsageError(f"{FLAG} on is not possible: {blocker.reason}. {blocker.advice_begins}, or drop {FLAG}.")
        return (True,), []
    return ((False,) if blockers else (False, True)), [Exclusion("pairing", blocker.reason) for blocker in blockers]


def pairs_fixed_plan(args: argparse.Namespace, config: LancetConfig) -> tuple[bool, list[str]]:
    """Whether a plan that is made without measurements is paired, and a note for the user if it can't be.

    Args:
        args: Megatron's arguments, validated.

    Raises:
        UsageError: the user asks for pairing, and the run can't pair.
    """
    allowed, excluded = allowed_pairing(args, config)
    notes = [f"not paired, because {exclusion.reason}" for exclusion in excluded[:1]]
    return True in allowed and (False not in allowed or getattr(args, _ASKED, False)), notes
