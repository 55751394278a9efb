"""Transformer Engine's core attention for chunks of a sequence.

Legend of shapes: s positions of the chunk, s' of it and the chunks before it, b chunk size, n heads, g key heads, k / v
channels of a head.
"""

from functools import cache
from typing import Any

import torch
from megatron.core.extensions import transformer_engine as megatron_te
from megatron.core.transformer.enums import AttnMaskType

from megatron_lancet.model.adopt import adopt
from megatron_lancet.model.chunking import Chunk
from megatron_lancet.model.recompute import maybe_recomputed


def is_te_attention(core: torch.nn.Module) -> bool:
    """Whether ``core`` is Megatron's wrapper of Transformer Engine's core attention."""
    return megatron_te.HAVE_TE and isinstance(core, megatron_te.TEDotProductAttention)


def call_per_chunk(core: torch.nn.Module) -> "TEAttentionPerChunk":
    """Makes a core attention for which :func:`is_te_attention` holds ready to see earlier chunks.

    Raises:
        UsageError: it is of a class derived from Megatron's wrapper.
    """
    adopted: Any = adopt(core, _subclass())
    return adopted


@cache
def _subclass() -> type:
    bases = (TEAttentionPerChunk, megatron_te.TEDotProductAttention)
    return type("TEDotProductAttentionPerChunk", bases, {"__module__": __name__})


class TEAttentionPerChunk:
    """Mixin for Transformer Engine's core attention.

    Attributes:
        chunk: the present sequence chunk, None for whole sequences.
        recomputed: whether the attention of a chunk runs a second time in the backward pass.
        recomputes_core: whether the core attention alone does. Megatron's own checkpoint would compute it without the
            chunk's earlier keys, and run a backward pass inside the backward pass.
    """

    chunk: Chunk | None = None
    recomputed: bool = False
    recomputes_core: bool = False

    def forward(
        self: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attention as Transformer Engine's; a sequence chunk sees the positions before it.

        Args:
            query: [s, b, n, k].
            key: [s, b, g, k].
            value: [s, b, g, v].

        Returns:
            [s, b, n * v].
        """
        if self.chunk is not None:
            key, value = self.chunk.with_earlier(self.layer_number, key, value, self.recomputed)
            if key.size(0) > query.size(0):
                assert attn_mask_type is AttnMaskType.causal, "refused when the plan was chosen"
                attn_mask_type = AttnMaskType.causal_bottom_right
        attend = super().forward  # type: ignore[misc]
        inputs = (query, key, value, attention_mask, attn_mask_type, *args)
        return maybe_recomputed(self.recomputes_core, lambda *inputs: attend(*inputs, **kwargs), *inputs)
