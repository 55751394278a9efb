"""The user's choice of how tokens are sampled. Imports no torch, so that a command refuses bad values at once."""

import math
from dataclasses import dataclass

from megatron_lancet.errors import UsageError

_MAX_SEED = (1 << 63) - 1


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        temperature: divisor of the logits; 0 always takes the most likely token.
        top_k: number of the most likely tokens to draw from; None draws from all.
        top_p: share of the probability that the most likely tokens to draw from have together; None draws from all.
        seed: seed of the random draws.

    Raises:
        UsageError: a value is out of range, or two values exclude each other.
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
            raise UsageError("--top-k and --top-p have no effect where the likeliest token is always taken: drop them.")
        if not 0 <= self.seed <= _MAX_SEED:
            raise UsageError(f"--seed expects a whole number from 0 to {_MAX_SEED}, got {self.seed}.")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0
