"""Pairing in a run, ``--lancet-pairing``: whether the backward of a micro-batch can be paired with the next forward."""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from megatron_lancet.config import LancetConfig, PlanChoice
from megatron_lancet.errors import UsageError
from megatron_lancet.feature import Feature
from megatron_lancet.feature_parts import PlanBlocker, PlanPart
from megatron_lancet.features.pairing import seams
from megatron_lancet.flags import CheckedFlags, flag, words
from megatron_lancet.planning.search.search_space import Exclusion, Limits
from megatron_lancet.schedule.plan import Plan, paired

FLAG = "--lancet-pairing"
MEGATRONS_FLAG = "--overlap-moe-expert-parallel-comm"
"""Megatron's own pairing, layer by layer. With a plan it asks for ours, see ``flag_mapping.py``."""
_ASKED = "lancet_pairing_asked"
"""Name among Megatron's arguments: the mapping clears the argument of Megatron's flag."""


class PairingChoice(StrEnum):
    """Whether the backward of each micro-batch is paired with the forward of the next."""

    ON = "on"
    """In every plan."""
    OFF = "off"
    """In none."""


@dataclass(frozen=True)
class PairingFlags(CheckedFlags):
    """Whether plans pair."""

    pairing: PairingChoice | None = flag(
        None,
        **words(PairingChoice, none_word="auto"),
        limits_plan=True,
        help="with gradient accumulation, interleave the backward of each micro-batch with the forward of the next, so "
        "one computes while messages of the other are in flight; needs no chunks. auto (default): the plan "
        "chooses; a run too short to choose one pairs where that is possible; so does a fixed plan if "
        "--overlap-moe-expert-parallel-comm is given.",
    )


class PairingFeature(Feature):
    """``--lancet-pairing``."""

    name = "pairing"
    flags = PairingFlags

    def missing_seams(self) -> Iterator[str]:
        """Yields what pairing uses of Megatron's schedules, and this Megatron lacks."""
        yield from seams.missing_seams()

    def flags_for_overlap(self, config: LancetConfig) -> Iterator[str]:
        """Yields the flag if it asks for pairs."""
        if config.of(PairingFlags).pairing is PairingChoice.ON:
            yield f"{FLAG} on"

    def take_over(self, flags: Sequence[str], args: argparse.Namespace, config: LancetConfig) -> str:
        """Notes that Megatron's flag was given, where the user leaves it to the plan."""
        is_open = config.plan is PlanChoice.AUTO and config.of(PairingFlags).pairing is None
        if MEGATRONS_FLAG not in flags or not is_open:
            return ""
        setattr(args, _ASKED, True)
        return ", and may pair backwards with forwards"

    def limited(self, limits: Limits, args: argparse.Namespace, config: LancetConfig) -> Limits:
        """Lets plans pair where the run can."""
        pairing, excluded = allowed_pairing(args, config)
        return replace(limits, pairing=pairing, excluded=(*limits.excluded, *excluded))

    def overlaps_whole(self, args: argparse.Namespace, config: LancetConfig) -> bool:
        """Whether the plan will be paired."""
        return pairs_fixed_plan(args, config)[0]

    def in_fixed_plan(self, plan: Plan, args: argparse.Namespace, config: LancetConfig) -> tuple[Plan, Sequence[str]]:
        """Pairs the plan if the user asks for pairs, or says nothing about chunks."""
        is_paired, why_not = pairs_fixed_plan(args, config)
        return paired(plan) if is_paired else plan, why_not

    def check_file(self, plan: Plan, file: Path, args: argparse.Namespace, config: LancetConfig) -> None:
        """Refuses a plan with pairing where the run can't pair."""
        for obstacle in pairing_blockers(args, config) if plan.is_paired else ():
            raise UsageError(
                f"--lancet-plan {file} pairs backwards with forwards, which is not possible here: {obstacle.reason}. "
                f"{obstacle.advice_begins}, or make a plan for this run."
            )

    def choices(self, limits: Limits) -> str:
        """Whether plans may pair."""
        both = " or ".join("paired" if is_paired else "not paired" for is_paired in limits.pairing)
        return f"micro-batches {both}"


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
    if config.of(PairingFlags).pairing is PairingChoice.OFF:
        return (False,), []
    blockers = list(pairing_blockers(args, config))
    if config.of(PairingFlags).pairing is PairingChoice.ON:
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
    is_asked = False not in allowed or getattr(args, _ASKED, False)
    # A pair hides messages with fewer ops than chunks, and without changing a bit of the result.
    return True in allowed and (is_asked or not config.asks_for_chunks), notes


PAIRING = PairingFeature()
