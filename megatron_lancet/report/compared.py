"""Compares steps without overlap with steps under the plan."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Compared:
    """Steps of a run without overlap and as many under its plan, measured in turns.

    Attributes:
        no_overlap_ms: median step of the slowest rank.
        own_ms: the same under the plan.
        no_overlap_exposed_ms: time of a step for which compute waited for messages; mean over ranks of medians.
        own_exposed_ms: the same under the plan.
        num_steps: measured steps of each.
    """

    no_overlap_ms: float
    own_ms: float
    no_overlap_exposed_ms: float
    own_exposed_ms: float
    num_steps: int

    @property
    def gain(self) -> float:
        """How many times as fast the plan is."""
        return self.no_overlap_ms / self.own_ms

    @property
    def no_overlap_share(self) -> float:
        """Exposed part of a step without overlap."""
        return self.no_overlap_exposed_ms / self.no_overlap_ms

    @property
    def own_share(self) -> float:
        """Exposed part of a step under the plan."""
        return self.own_exposed_ms / self.own_ms

    def figures(self) -> str:
        """Both steps and how they were measured, for brackets behind a sentence."""
        shares = f"exposed {100 * self.no_overlap_share:.0f} % -> {100 * self.own_share:.0f} %"
        steps = f"{self.no_overlap_ms:.0f} ms -> {self.own_ms:.0f} ms a step"
        return f"{steps}, {shares}; measured in turns, n={self.num_steps}"
