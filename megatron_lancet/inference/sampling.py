"""How the next token is chosen, as the user asks for it. No torch: a command refuses what can't be at once."""

import math
from dataclasses import dataclass

from megatron_lancet.errors import UsageError

_MAX_SEED = (1 << 63) - 1


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        temperature: logits are divided by it; 0 always takes the most likely token.
        top_k: draw among so many of the most likely tokens; None among all.
        top_p: draw among the most likely tokens that have this share of the probability together; None among all.
        seed: of the draws.

    Raises:
        UsageError: a value that can't be, or two that exclude each other.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < math.inf:
            raise UsageError(f"--temperature expects a number of at least 0, got {self.temperature:g}.")
        if self.top_k is not None and self.top_k < 1:
            raise UsageError(f"--top-k expects a whole number of at least 1, got {self.top_k}.")
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            raise UsageError(f"--top-p expects a number above 0 and at most 1, got {self.top_p:g}.")
        if self.top_k is not None and self.top_p is not None:
            raise UsageError("--top-k and --top-p exclude each other: drop one of them.")
        if self.greedy and not (self.top_k is None and self.top_p is None):
            raise UsageError("--top-k and --top-p mean nothing where the likeliest token is always taken: drop them.")
        if not 0 <= self.seed <= _MAX_SEED:
            raise UsageError(f"--seed expects a whole number from 0 to {_MAX_SEED}, got {self.seed}.")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0
