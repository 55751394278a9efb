"""What a model asks of its optional parts, which ``registry.py`` names.

The core runs the plain dispatch of a GPT's decoder, one message for all rows of a chunk. A part adds a dispatcher,
replaces ops of a layer, refuses plans, or prepares modules that the core does not know.
"""

from collections.abc import Mapping
from typing import Any

from megatron_lancet.model.dispatcher.base import Dispatcher, ExpertRanks
from megatron_lancet.model.overlapping_moe import ForwardOps
from megatron_lancet.schedule.plan import Dispatch, Plan, Segment


class ModelPart:
    """An optional part of a model. Every method may be left out."""

    def dispatchers(self, ranks: ExpertRanks) -> Mapping[Dispatch, Dispatcher]:
        """The dispatchers that it adds to a layer with experts."""
        return {}

    def ops(self, segment: Segment, dispatch: Dispatch, ops: ForwardOps) -> ForwardOps:
        """The ops of a layer with experts that it adds or replaces.

        Args:
            segment: the segment of the plan.
            dispatch: what all-to-alls carry.
            ops: the ops so far.
        """
        return {}

    def check_plan(self, plan: Plan, model: Any, max_expert_rows: int | None) -> None:
        """
        Args:
            max_expert_rows: rows of a chunk that a rank's experts may work on at a time; None for any number.

        Raises:
            UsageError: the plan needs what the model, prepared for plans, does not have.
        """
