"""The time of documents, relative to each other: linear in tokens, quadratic in lengths."""

from dataclasses import dataclass


@dataclass(frozen=True)
class DocumentCost:
    """The cost of tokens that attend to their own document only, in units of one token's linear part.

    Attributes:
        tokens_per_pair: cost of one pair of a position and one that it attends to, itself included. 0 where attention
            costs nothing.
    """

    tokens_per_pair: float

    def of(self, length: int, start: int = 0) -> float:
        """Cost of ``length`` tokens at positions ``start`` to ``start + length - 1`` of a document."""
        return length + self.tokens_per_pair * num_pairs(length, start)


def num_pairs(length: int, start: int = 0) -> int:
    """Pairs of a position and one up to it in the same document, for ``length`` positions from ``start`` on."""
    return length * start + length * (length + 1) // 2
