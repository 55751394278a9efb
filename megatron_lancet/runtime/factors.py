"""The two factors of a weight gradient, whose product is computed later.

Legend of shapes: T rows, I inputs, O outputs of a linear layer.
"""

from collections.abc import Hashable
from typing import NamedTuple, Protocol

import torch


class Factors(NamedTuple):
    """The factors of a dW, with equally many rows each.

    Attributes:
        grad_TO: output gradients.
        input_TI: inputs.
    """

    grad_TO: torch.Tensor
    input_TI: torch.Tensor

    @property
    def num_bytes(self) -> int:
        """Memory of both."""
        return self.grad_TO.nbytes + self.input_TI.nbytes


class JoinedFactors(Protocol):
    """The factors of the dW of an expert whose rows come in parts."""

    @property
    def num_bytes(self) -> int:
        """Memory that the parts keep alive."""

    def joined(self) -> Factors:
        """The factors of all rows."""


class PartOfRows(Protocol):
    """The part of a chunk's rows on which linear layers of experts run."""

    def add(self, linear: Hashable, factors: Factors, expert: int | None = None) -> JoinedFactors | None:
        """Takes the factors of the part's dW.

        Args:
            linear: the linear layer.
            expert: the local expert; None for a linear layer that is one expert's.

        Returns:
            The factors of all parts when they are complete, else None.
        """
