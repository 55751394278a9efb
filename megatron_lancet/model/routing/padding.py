"""Padding masks: padding tokens go to experts like all others; balancing losses and token counts exclude them.

Legend of shapes: S positions on this rank, B micro-batch size, H hidden size.
"""

import torch

from megatron_lancet.errors import UsageError
from megatron_lancet.model.samples import PackedMicroBatch


def padding_of(
    padding_mask: torch.Tensor | None, hidden_SBH: torch.Tensor, packed: PackedMicroBatch | None
) -> torch.Tensor | None:
    """Returns which tokens of a micro-batch are padding, [S, B] bool; None if Megatron passes no mask.

    Args:
        padding_mask: [B, S], True for padding tokens; [1, B * S] for flat documents.
        packed: the documents; None if each sample is a document.

    Raises:
        UsageError: the mask's shape does not match this rank's tokens.
    """
    if padding_mask is None:
        return None
    shape = (hidden_SBH.size(1), hidden_SBH.size(0))
    if packed is not None and packed.is_flat and padding_mask.shape == (1, shape[0] * shape[1]):
        padding_mask = padding_mask.view(shape)
    if padding_mask.shape != shape:
        raise UsageError(
            f"the layers got a padding_mask of shape {list(padding_mask.shape)}, but this rank has {shape[0]} samples "
            f"of {shape[1]} positions. Pass a mask of shape {list(shape)}: with --sequence-parallel Megatron splits it "
            "only in the first pipeline stage of a GPT model."
        )
    return padding_mask.transpose(0, 1).bool().contiguous()


def padding_for_stock(
    padding_mask: torch.Tensor | None, hidden_SBH: torch.Tensor, packed: PackedMicroBatch
) -> torch.Tensor | None:
    """Returns the mask of :func:`padding_of` in the layout of Megatron's own layers, [B, S]."""
    padding_SB = padding_of(padding_mask, hidden_SBH, packed)
    return None if padding_SB is None else padding_SB.T
