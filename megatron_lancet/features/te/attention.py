"""Transformer Engine's core attention for chunks of a sequence.

Legend of shapes: s positions of the chunk, s' of it and the chunks before it, b chunk size, n heads, g key heads, k / v
channels of a head.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any

import torch
from megatron.core.extensions import transformer_engine as megatron_te
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType

from megatron_lancet.errors import UsageError
from megatron_lancet.model.adopt import adopt
from megatron_lancet.model.attention.sdpa import AttentionPerChunk
from megatron_lancet.model.recompute import maybe_recomputed
from megatron_lancet.model.samples import Documents

_MOST_SELECTIONS = 16
"""Bound for each module: samples of many lengths would keep one selection each."""


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


class TEAttentionPerChunk(AttentionPerChunk):
    """Mixin for Transformer Engine's core attention."""

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

        Raises:
            UsageError: there is a bias of the scores, and chunks of a sequence or documents.
        """
        if self.chunk is not None and kwargs.get("attention_bias") is not None:
            raise UsageError(
                "expected no attention_bias with sequence chunks or packed documents, found one: it is for whole "
                "sequences. Drop it, or pass --lancet-chunk-dim batch and no documents, or --lancet-plan off."
            )
        documents = None if self.chunk is None else self.chunk.documents
        if self.chunk is not None and self.chunk.earlier is not None:
            assert documents is None, "refused when the plan was chosen"
            key, value = self.chunk.with_earlier(self.layer_number, key, value, self.recomputed)
            if key.size(0) > query.size(0):
                assert attn_mask_type is AttnMaskType.causal, "refused when the plan was chosen"
                attn_mask_type = AttnMaskType.causal_bottom_right
        attend = super().forward  # type: ignore[misc]
        inputs = (query, key, value, attention_mask, attn_mask_type, *args)

        # What recomputation keeps holds no tensor but its inputs: their memory may be free until they are recomputed.
        def run(*inputs: Any) -> torch.Tensor:
            if documents is None:
                with self._own_selection((inputs[0].shape, inputs[1].size(0), attn_mask_type)):
                    return attend(*inputs, **kwargs)
            with _value_channels(self, inputs[0].size(-1)):
                return _attend_to_documents(attend, documents, *inputs[:3])

        return maybe_recomputed(self.recomputes_core, run, *inputs)

    @contextmanager
    def _own_selection(self: Any, key: Hashable) -> Iterator[None]:
        """Inside, Transformer Engine finds the backend that it selected for the last call with ``key``.

        Transformer Engine keeps the selection of its last call only. Sequence chunks alternate between lengths, so each
        call would select again, which takes the host as long as many launches. Transformer Engine compares the
        parameters before it reuses a selection, so a wrong one is never used.
        """
        kept, selections = _kept_selection(), self.__dict__.setdefault("_selections", {})
        is_reset = kept["attention_params"] is None or kept["backend_selection_requires_update"]
        if is_reset or len(selections) > _MOST_SELECTIONS:
            selections.clear()
        kept.update(selections.get(key, {}))
        yield
        selections[key] = dict(kept)


def _kept_selection() -> dict[str, Any]:
    """What Transformer Engine keeps of its last selection of an attention backend."""
    module = "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention"
    kept: dict[str, Any] = import_module(module)._attention_backends
    return kept


def _attend_to_documents(
    attend: Callable[..., torch.Tensor],
    documents: Documents,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> torch.Tensor:
    """Attention inside documents, [s, b, n * v], with Transformer Engine's kernels for sequences of several lengths.

    Args:
        attend: Megatron's wrapper of Transformer Engine's attention, which takes one sample behind the other.
    """
    num_positions, num_samples = query.shape[:2]
    channels = value.size(-1)
    # These kernels take heads of one size; multi-latent attention's values are narrower.
    value = torch.nn.functional.pad(value, (0, query.size(-1) - channels))
    end_to_end = (tensor.transpose(0, 1).flatten(0, 1) for tensor in (query, key, value))
    bounds = documents.bounds(0, num_positions, query.device)
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds.query_ends,
        cu_seqlens_kv=bounds.key_ends,
        max_seqlen_q=bounds.most_queries,
        max_seqlen_kv=bounds.most_keys,
    )
    context = attend(*end_to_end, None, AttnMaskType.padding_causal, packed_seq_params=packed)
    context = context.view(num_samples, num_positions, query.size(2), -1)[..., :channels]
    return context.transpose(0, 1).flatten(2)


@contextmanager
def _value_channels(core: Any, number: int) -> Iterator[None]:
    """Inside the context, Transformer Engine's attention expects values of ``number`` channels."""
    built = core.hidden_size_per_attention_head_v
    core.hidden_size_per_attention_head_v = number
    try:
        yield
    finally:
        core.hidden_size_per_attention_head_v = built
