"""What a message of a mocked group does to tensors."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Transfer:
    """The effect of a message. Tensors are written through ``.data``, which autograd does not see.

    Attributes:
        copies: targets and sources, of as many elements.
        in_place: tensors that go over the link and come back with the same values.
        factor: what a reduction multiplies targets and ``in_place`` by, after they have arrived.
    """

    copies: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()
    in_place: Sequence[torch.Tensor] = ()
    factor: int = 1

    @property
    def inputs(self) -> list[torch.Tensor]:
        """Tensors that are read only."""
        return list({id(source): source for _, source in self.copies}.values())

    @property
    def outputs(self) -> list[torch.Tensor]:
        """Tensors that the message gives."""
        return [*(target for target, _ in self.copies), *self.in_place]

    def deliver(self) -> None:
        """Moves the data at full speed."""
        for target, source in self.copies:
            target.data.copy_(source.data.view_as(target))
        self.reduce()

    def reduce(self) -> None:
        """The reduction of data that has arrived."""
        if self.factor != 1:
            for tensor in self.outputs:
                tensor.data.mul_(self.factor)
