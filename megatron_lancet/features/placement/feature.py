"""``--lancet-expert-placement`` and ``--lancet-rebalance-interval`` in a run."""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

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
from megatron_lancet.features.placement.rebalance import Rebalancer, check_can_rebalance
from megatron_lancet.features.placement.steps import optimizer_of_steps
from megatron_lancet.model.gpt import LanguageModel
from megatron_lancet.planning.load.placement import Placement
from megatron_lancet.runtime.comm import Comm
from megatron_lancet.schedule.nodes import Nodes
from megatron_lancet.training.megatron import checkpoint_patches
from megatron_lancet.training.plan.dispatch import nodes_of
from megatron_lancet.training.run import OverlappedRun, Run


class ExpertPlacement(Feature):
    """Experts on other ranks than Megatron's."""

    name = "placement"
    flags = PlacementFlags

    def needs_plan(self, config: LancetConfig) -> bool:
        """Whether experts may be on other ranks."""
        return config.of(PlacementFlags).places_experts

    def check(self, facts: RunFacts) -> None:
        """Refuses what the run can't place or move."""
        check_can_rebalance(facts.args, facts.config, facts.plan)
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
        """Places the experts of the run, and moves them if it asks for that."""
        placements = _placements(run.facts)
        if placements is None:
            return None
        assert isinstance(run, OverlappedRun)
        args, interval = run.facts.args, run.config.of(PlacementFlags).rebalance_interval
        if interval is None:
            return ActivePlacement(args, placements, None)
        nodes = nodes_of(args, run.config)
        known = nodes if isinstance(nodes, Nodes) else None
        mover = Rebalancer(args, interval, run.setup, run.recorder, run.is_settled, known)
        return ActivePlacement(args, placements, mover)


class ActivePlacement(ActiveFeature):
    """The placement of a run.

    Args:
        placements: where experts are, by layer; other layers have Megatron's order.
        rebalancer: moves experts between steps; None where they stay.
    """

    def __init__(
        self, args: argparse.Namespace, placements: Mapping[int, Placement], rebalancer: Rebalancer | None
    ) -> None:
        self._args = args
        self._placements = placements
        self._rebalancer = rebalancer

    def enter(self, stack: ExitStack) -> None:
        """Checks checkpoints before they are loaded."""
        check = partial(check_reshardable, self._args)
        stack.enter_context(checkpoint_patches.arguments_before_loading(check))
        if self._rebalancer is not None:
            stack.enter_context(optimizer_of_steps(self._rebalancer.take_optimizer))

    def adopt(self, stages: Sequence[LanguageModel], comm: Comm) -> None:
        """Puts experts at their slots."""
        apply_placement(stages, self._placements)

    def observe(self, step: Callable[[], Any]) -> Any:
        """Runs a training step, and moves experts if it ends a window."""
        return step() if self._rebalancer is None else self._rebalancer.observe(step)


def _placements(facts: RunFacts) -> Mapping[int, Placement] | None:
    """The placement of the run's layers; in a dry run without what a missing file says."""
    config, wanted = facts.config, facts.config.of(PlacementFlags)
    if facts.is_dry_run and wanted.expert_placement is not None and not wanted.expert_placement.is_file():
        known = replace(wanted, expert_placement=None)
        config = replace(config, settings={**config.settings, PlacementFlags: known})
    return choose_placement(facts.args, config, facts.plan)


PLACEMENT = ExpertPlacement()
