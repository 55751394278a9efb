"""Names of the things that a plan schedules: one string per op, in plans, logs, errors and reports."""

from dataclasses import dataclass
from enum import StrEnum


class Phase(StrEnum):
    """Which part of a step an op belongs to."""

    FORWARD = "F"
    INPUT_GRAD = "I"
    WEIGHT_GRAD = "W"


_IN_WORDS = {
    Phase.FORWARD: "forward",
    Phase.INPUT_GRAD: "backward (input gradient)",
    Phase.WEIGHT_GRAD: "backward (weight gradient)",
}


@dataclass(frozen=True)
class Op:
    """One op of one chunk in one layer, for example ``L3.c0.F.dispatch``.

    Attributes:
        layer: Megatron's global layer number, from 1.
        chunk: index of the chunk in its micro-batch, from 0.
        phase: forward, input gradient (dX) or weight gradient (dW).
        kind: what it does: ``counts``, ``dispatch``, ``combine``, or a linear layer's name.
    """

    layer: int
    chunk: int
    phase: Phase
    kind: str

    def __str__(self) -> str:
        return f"L{self.layer}.c{self.chunk}.{self.phase}.{self.kind}"

    def in_words(self) -> str:
        """For a reader who does not know the names."""
        return f"layer {self.layer}, chunk {self.chunk}, {_IN_WORDS[self.phase]}, {self.kind}"

    def mirrored(self) -> "Op":
        """The op that undoes this one's data flow in the backward pass."""
        return Op(self.layer, self.chunk, Phase.INPUT_GRAD, self.kind)
