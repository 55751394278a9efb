"""``--lancet-expert-placement`` in a run."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial

from megatron_lancet.config import LancetConfig
from megatron_lancet.feature import ActiveFeature, Feature, RunFacts
from megatron_lancet.features.placement.flags import PlacementFlags
from megatron_lancet.features.placement.placement import (
    FLAG,
    apply_placement,
    check_reshardable,
    choose_placement,
    placement_note,
)
from megatron_lancet.model.gpt import LanguageModel
from megatron_lancet.planning.load.placement import Placement
from megatron_lancet.runtime.comm import Comm
from megatron_lancet.training.megatron import checkpoint_patches
from megatron_lancet.training.run import Run


class ExpertPlacement(Feature):
    """Experts on other ranks than Megatron's."""

    name = "placement"
    flags = PlacementFlags

    def needs_plan(self, config: LancetConfig) -> bool:
        """Whether experts may be on other ranks."""
        return config.of(PlacementFlags).expert_placement is not None

    def check(self, facts: RunFacts) -> None:
        """Refuses what the run can't place."""
        _placements(facts)

    def missing_files(self, config: LancetConfig) -> Iterator[str]:
        """Yields a line if the placement is not on this machine."""
        path = config.of(PlacementFlags).expert_placement
        if path is not None and not path.is_file():
            yield f"{FLAG} {path} is not here: it is checked when the run starts"

    def note(self, facts: RunFacts) -> str:
        """Says how many layers have another order."""
        return placement_note(_placements(facts))

    def start(self, run: Run) -> "ActivePlacement | None":
        """Places the experts of the run."""
        placements = _placements(run.facts)
        return None if placements is None else ActivePlacement(run.facts.args, placements)


class ActivePlacement(ActiveFeature):
    """The placement of a run.

    Args:
        placements: where experts are, by layer; other layers have Megatron's order.
    """

    def __init__(self, args: argparse.Namespace, placements: Mapping[int, Placement]) -> None:
        self._args = args
        self._placements = placements

    def enter(self, stack: ExitStack) -> None:
        """Checks checkpoints before they are loaded."""
        check = partial(check_reshardable, self._args)
        stack.enter_context(checkpoint_patches.arguments_before_loading(check))

    def adopt(self, stages: Sequence[LanguageModel], comm: Comm) -> None:
        """Puts experts at their slots."""
        apply_placement(stages, self._placements)


def _placements(facts: RunFacts) -> Mapping[int, Placement] | None:
    """The placement of the run's layers; None for Megatron's, and in a dry run without the file."""
    path = facts.config.of(PlacementFlags).expert_placement
    if facts.is_dry_run and path is not None and not path.is_file():
        return None
    return choose_placement(facts.args, facts.config, facts.plan)


PLACEMENT = ExpertPlacement()
