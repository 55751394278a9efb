"""Padding, whose tokens go to experts as all others do; balancing losses and counts of tokens leave them out.

Legend of shapes: S positions on this rank, B micro-batch size, H hidden size.
"""

import torch

from megatron_lancet.errors import UsageError
from megatron_lancet.model.documents.packed import PackedMicroBatch


def padding_of(
    padding_mask: torch.Tensor | None, hidden_SBH: torch.Tensor, packed: PackedMicroBatch | None
) -> torch.Tensor | None:
    """Which tokens of a micro-batch are padding, [S, B] bool; None where Megatron passes no mask.

    Args:
        padding_mask: [B, S], True where a token is padding; [1, B * S] where documents came in this form.
        packed: the documents; None where a sample is one.

    Raises:
        UsageError: the mask is not of this rank's tokens.
    """
    if padding_mask is None:
        return None
    shape = (hidden_SBH.size(1), hidden_SBH.size(0))
    if packed is not None and packed.is_flat and padding_mask.shape == (1, shape[0] * shape[1]):
        padding_mask = padding_mask.view(shape)
    if padding_mask.shape != shape:
        raise UsageError(
            f"the layers got a padding_mask of shape {list(padding_mask.shape)}, and this rank has {shape[0]} samples "
            f"of {shape[1]} positions. Pass a mask of shape {list(shape)}: under --sequence-parallel Megatron cuts it "
            "in the first pipeline stage of a GPT model only."
        )
    return padding_mask.transpose(0, 1).bool().contiguous()


def padding_for_stock(
    padding_mask: torch.Tensor | None, hidden_SBH: torch.Tensor, packed: PackedMicroBatch
) -> torch.Tensor | None:
    """The mask of :func:`padding_of` as Megatron's own layers take it, [B, S]."""
    padding_SB = padding_of(padding_mask, hidden_SBH, packed)
    return None if padding_SB is None else padding_SB.T
