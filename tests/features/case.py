"""A model and a plan that ranks compare with stock Megatron: the form of each feature's list of cases."""

from typing import Any, NamedTuple

from megatron_lancet.schedule.plan import Plan

LAYOUTS: dict[str, dict[str, int]] = {
    "EP4": {"expert_model_parallel_size": 4},
    "EP2xDP2": {"expert_model_parallel_size": 2},
    "EP2xTP2": {"expert_model_parallel_size": 2, "tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
    "EP2xETP2": {"expert_model_parallel_size": 2, "tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2},
    "EP2xCP2": {"expert_model_parallel_size": 2, "context_parallel_size": 2},
    "EP4xCP2": {"expert_model_parallel_size": 4, "context_parallel_size": 2},
    "EP4xTP2": {"expert_model_parallel_size": 4, "tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
    "EP2xTP2xCP2": {
        "expert_model_parallel_size": 2,
        "tensor_model_parallel_size": 2,
        "context_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
    },
}
"""Sizes of Megatron's groups on four ranks, by name."""


class Case(NamedTuple):
    """A model, its plan and how both run.

    Attributes:
        overrides: of the config, see ``gradients_worker.build``.
        layout: of :data:`LAYOUTS`, on four ranks; None on two ranks with EP=2.
        disturbed: whether transfers seem done, or not, at random and differently on each rank.
        changes_sums: whether sums have another order than stock's though there is one chunk.
        max_rows: that a rank's experts work on at a time; None for any number.
        moves_weights: whether weights move with experts that are on other ranks than stock's; None if no expert is.
        idle: ranks whose experts get no token.
    """

    overrides: dict[str, Any]
    plan: Plan
    layout: str | None = None
    disturbed: bool = False
    changes_sums: bool = False
    max_rows: int | None = None
    moves_weights: bool | None = None
    idle: tuple[int, ...] = ()

    @property
    def is_exact(self) -> bool:
        """Whether the results must be stock's to the bit."""
        return self.plan.num_chunks == 1 and not self.changes_sums
