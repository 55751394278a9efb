"""Cuts a micro-batch into chunks and puts the results together again.

Legend of shapes: S sequence length, B micro-batch size, b chunk size, H hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_lancet.schedule.plan import Plan

_BATCH_DIM = 1
"""Of hidden states [S, B, H]."""


@dataclass(frozen=True)
class Chunk:
    """A slice of one micro-batch on its way through the layers.

    Attributes:
        index: place among the chunks of the micro-batch.
        num_chunks: how many there are.
        attention_mask: [b or 1, 1, S, S] or None, True where attention is not allowed.
        rotary_pos_emb: rotary embedding of the sequence, the same for all samples, or None.
        attention_bias: added to the attention scores, broadcast over samples, or None.
    """

    index: int
    num_chunks: int
    attention_mask: torch.Tensor | None = None
    rotary_pos_emb: torch.Tensor | None = None
    attention_bias: torch.Tensor | None = None

    @property
    def is_last(self) -> bool:
        """Whether this is the chunk after which a layer's router has seen the whole micro-batch."""
        return self.index == self.num_chunks - 1


def split_hidden(hidden_SBH: torch.Tensor, plan: Plan) -> Sequence[torch.Tensor]:
    """Hidden states of each chunk, [S, b, H] contiguous."""
    if plan.num_chunks == 1:
        return [hidden_SBH]
    sizes = plan.chunk_sizes(hidden_SBH.size(_BATCH_DIM))
    # One split node: its backward writes each chunk's gradient once, slices would add k padded tensors.
    return [part.contiguous() for part in torch.split(hidden_SBH, sizes, dim=_BATCH_DIM)]


def merge_hidden(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Inverse of :func:`split_hidden`: [S, B, H]."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=_BATCH_DIM)


def split_mask(mask: torch.Tensor | None, sizes: Sequence[int]) -> Sequence[torch.Tensor | None]:
    """Attention mask of each chunk; one that is the same for all samples ([1, 1, S, S]) is shared."""
    if mask is None or mask.size(0) != sum(sizes) or len(sizes) == 1:
        return [mask] * len(sizes)
    return list(torch.split(mask, list(sizes), dim=0))
