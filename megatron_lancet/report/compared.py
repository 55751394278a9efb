"""Compares steps without overlap with steps under the plan."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Compared:
    """Steps of a run without overlap and as many under its plan, measured in turns.

    Attributes:
        no_overlap_ms: median over the steps; each is the slowest rank's.
        own_ms: the same under the plan.
        no_overlap_exposed_ms: time for which compute waited for messages: median over the steps of the ranks' mean.
        own_exposed_ms: the same under the plan.
        num_steps: measured steps of each.
        in_turns: whether they ran in turns, and so met the same disturbances; else one after the other.
    """

    no_overlap_ms: float
    own_ms: float
    no_overlap_exposed_ms: float
    own_exposed_ms: float
    num_steps: int
    in_turns: bool = True

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
        return f"{steps}, {shares}; measured {self.how}, n={self.num_steps}"

    @property
    def how(self) -> str:
        """In which order they were measured."""
        return "in turns" if self.in_turns else "one after the other"
