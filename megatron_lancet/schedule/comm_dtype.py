"""The number format of hidden states in all-to-alls."""

from enum import Enum, StrEnum

from megatron_lancet.schedule.ops import DISPATCHES, Op, Phase

FP8_GROUP = 128
"""Elements of a row that share a scale in fp8; the last group of a row may be shorter."""


class RowFormat(Enum):
    """Number format of hidden states in one message."""

    EXACT = "exact"
    """The type of the hidden states."""
    BF16 = "bf16"
    """16 bits."""
    FP8 = "fp8"
    """8 bits (e4m3) with a scale for each group."""


class CommDtype(StrEnum):
    """Number format of hidden states in the messages of a run."""

    EXACT = "exact"
    """The type of the hidden states."""
    FP8 = "fp8"
    """8 bits (e4m3) with a scale for each group in forward dispatches, bf16 in combines and in all gradients.

    With two hops a row is rounded again in the second one, which finds the numbers of the first in a forward dispatch.
    """

    @property
    def in_name(self) -> str:
        """Suffix of the name of a plan or a model whose messages have this format."""
        return "" if self is CommDtype.EXACT else f" comm_dtype={self}"

    def row_format(self, op: Op) -> RowFormat:
        """The format of one message of a run with this format."""
        if self is CommDtype.EXACT:
            return RowFormat.EXACT
        is_forward_dispatch = op.kind in DISPATCHES and op.phase is Phase.FORWARD
        return RowFormat.FP8 if is_forward_dispatch else RowFormat.BF16
