"""The number format in which hidden states travel in all-to-alls: ``--lancet-wire``."""

from enum import StrEnum

from megatron_lancet.schedule.ops import DISPATCHES, Op, Phase

FP8_GROUP = 128
"""Elements of a row that share a scale in fp8; the last group of a row may be shorter."""


class Wire(StrEnum):
    """Number format of hidden states on the wire, for a run and for one message of it."""

    EXACT = "exact"
    """The type that they have."""
    BF16 = "bf16"
    """16 bits, in every message."""
    FP8 = "fp8"
    """8 bits (e4m3) with a scale for each group in forward dispatches, bf16 in combines and in all gradients.

    With two hops a row is rounded again in the second one, which finds the numbers of the first in a forward dispatch.
    """

    def of_message(self, op: Op) -> "Wire":
        """The format of one message of a run with this format."""
        is_forward_dispatch = op.kind in DISPATCHES and op.phase is Phase.FORWARD
        return Wire.BF16 if self is Wire.FP8 and not is_forward_dispatch else self
