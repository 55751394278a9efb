"""Tiles in a run, ``--lancet-tiles``: how many tiles a dispatch may have, and why not."""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from megatron_lancet.config import LancetConfig
from megatron_lancet.errors import UsageError
from megatron_lancet.feature import Feature
from megatron_lancet.feature_parts import PlanPart
from megatron_lancet.flags import CheckedFlags, flag
from megatron_lancet.planning.search.search_space import TILES as TRIED
from megatron_lancet.planning.search.search_space import Exclusion, Limits
from megatron_lancet.schedule.dispatch import Dispatch
from megatron_lancet.schedule.layout import Blocker, tiles_blocker
from megatron_lancet.schedule.plan import DwPolicy, Plan
from megatron_lancet.training.plan.dispatch import FLAG as DISPATCH_FLAG
from megatron_lancet.training.plan.dispatch import layout_of

FLAG = "--lancet-tiles"


class TilesChoice(StrEnum):
    """Who chooses the number of tiles."""

    AUTO = "auto"
    """The planner."""


def _tiles(text: str) -> int | TilesChoice:
    """
    Raises:
        UsageError: the text is neither ``auto`` nor a number of at least 0.
    """
    if text == TilesChoice.AUTO:
        return TilesChoice.AUTO
    if not text.isdecimal():
        raise UsageError(f"{FLAG} expects auto, or a number of tiles, 0 for none, got {text}.")
    return int(text)


@dataclass(frozen=True)
class TilesFlags(CheckedFlags):
    """The number of tiles."""

    tiles: int | TilesChoice | None = flag(
        None,
        read=_tiles,
        limits_plan=True,
        metavar="{auto,N}",
        help="split each dispatch and combine into N messages, so experts start on local tokens and the first tile "
        "while the rest is in flight. 0 (default): no tiles. auto: the planner chooses, for unchunked micro-batches; "
        "a fixed plan has no tiles.",
    )


class TilesFeature(Feature):
    """``--lancet-tiles``."""

    name = "tiles"
    flags = TilesFlags

    def flags_for_overlap(self, config: LancetConfig) -> Iterator[str]:
        """Yields the flag if it asks for tiles."""
        number = _number(config)
        if number:
            yield f"{FLAG} {number}"

    def allows(self, dispatch: Dispatch, config: LancetConfig) -> bool:
        """Whether a dispatch can have the tiles that the user asks for."""
        return dispatch.can_tile or not _number(config)

    def limited(self, limits: Limits, args: argparse.Namespace, config: LancetConfig) -> Limits:
        """Lets plans have tiles where the run can."""
        tiles, excluded = allowed_tiles(args, config)
        return replace(limits, tiles=tiles, excluded=(*limits.excluded, *excluded))

    def in_fixed_plan(self, plan: Plan, args: argparse.Namespace, config: LancetConfig) -> tuple[Plan, Sequence[str]]:
        """Cuts the messages of a plan with one segment into as many tiles as the user asks for."""
        allowed_tiles(args, config)
        number = _number(config)
        if not number:
            return plan, ()
        (whole,) = plan.segments
        segment = replace(whole, tiles=number)
        window = segment.all_to_alls_per_layer(plan.dispatch) if plan.dw_policy is DwPolicy.FILL else 0
        return replace(plan, segments=(segment,), dw_window=window), ()

    def check_file(self, plan: Plan, file: Path, args: argparse.Namespace, config: LancetConfig) -> None:
        """Refuses a plan with tiles where the run can't have any."""
        blocker = tiles_blocker_of(args, config) if plan.has_tiles else None
        if blocker is not None:
            raise UsageError(
                f"--lancet-plan {file} sends rows in tiles, which is not possible here: {blocker.reason}. Make a "
                f"plan for this run with --tiles 0, or {blocker.advice}."
            )

    def choices(self, limits: Limits) -> str:
        """The numbers of tiles that plans may have, unless none has any."""
        if limits.tiles == (0,):
            return ""
        numbers = (0, *TRIED) if limits.tiles is None else limits.tiles
        return f"tiles {' or '.join(str(number) if number else 'none' for number in numbers)}"


def _number(config: LancetConfig) -> int:
    """Tiles that each plan must have; 0 if it need not have any."""
    tiles = config.of(TilesFlags).tiles
    return tiles if isinstance(tiles, int) else 0


def tiles_blocker_of(args: argparse.Namespace, config: LancetConfig) -> Blocker | None:
    """Why the rows of a run can't go to other ranks in tiles; None if they can.

    Args:
        args: Megatron's arguments, validated or not.
    """
    blocker = tiles_blocker(layout_of(args, config, None))
    if blocker is not None:
        return blocker
    if config.dispatch is not None and not config.dispatch.can_tile:
        return Blocker(
            f"the messages of {DISPATCH_FLAG} {config.dispatch} have no tiles", advice=f"drop {DISPATCH_FLAG}"
        )
    for feature in config.features:
        for found in feature.plan_blockers(PlanPart.TILES, args, config):
            return Blocker(found.reason, advice=found.advice)
    return None


def allowed_tiles(args: argparse.Namespace, config: LancetConfig) -> tuple[tuple[int, ...] | None, list[Exclusion]]:
    """Numbers of tiles that a planner may choose, and why the run excludes others; None for the profiled numbers.

    By default no tiles are tried: no measured training was fastest with them, and their profile takes four steps.

    Args:
        args: Megatron's arguments, validated or not.

    Raises:
        UsageError: the user asks for tiles, and the run can't have any.
    """
    blocker, number = tiles_blocker_of(args, config), _number(config)
    if number and blocker is not None:
        raise UsageError(f"{FLAG} {number} is not possible: {blocker.reason}. Pass {FLAG} 0, or {blocker.advice}.")
    if config.of(TilesFlags).tiles is not TilesChoice.AUTO:
        return (number,), []
    return (None, []) if blocker is None else ((0,), [Exclusion("tiles", blocker.reason, is_evident=True)])


TILES = TilesFeature()
