"""Self-attention of a chunk with torch's fused kernel, over positions of earlier chunks and of other ranks.

Megatron cuts a sequence into 2N slices for the N ranks of a context-parallel group; rank r gets slices r and 2N-1-r, so
that causal attention costs all ranks the same.

Legend of shapes: s positions of the chunk on this rank, s' of keys that it sees, S of the whole sequence, b chunk
size, n heads, g key heads, k / v channels of a head.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

from megatron_lancet.model.chunking import Chunk
from megatron_lancet.model.parts import document_reader
from megatron_lancet.model.recompute import maybe_recomputed
from megatron_lancet.model.samples import Documents
from megatron_lancet.runtime.device import on_cuda

_KERNEL_TAKES_GROUPS = "enable_gqa" in signature(varlen_attn).parameters
"""Whether the kernel for documents takes fewer key heads than query heads; torch 2.11's does not say so."""


def sdpa_blockers(settings: Any) -> list[str]:
    """Returns the flags that are set and that the fused kernel does not support.

    Args:
        settings: Megatron's arguments, or the configuration that was made of them.
    """
    blockers = {
        "--window-size": settings.window_size is not None,
        f"--softmax-type {settings.softmax_type}": settings.softmax_type != "vanilla",
    }
    return [flag for flag, is_set in blockers.items() if is_set]


class AttentionPerChunk:
    """Mixin for a core attention whose chunks see earlier ones.

    Attributes:
        chunk: the present sequence chunk, or one with documents; None for whole sequences.
        recomputed: whether the attention of a chunk runs a second time in the backward pass.
        recomputes_core: whether the core attention alone does. Megatron's own checkpoint would compute it without the
            chunk's earlier keys and its documents, and run a backward pass inside the backward pass, in which each
            chunk reports a weight of the softmax to DDP.
    """

    chunk: Chunk | None = None
    recomputed: bool = False
    recomputes_core: bool = False


class RecomputedAttention(AttentionPerChunk, DotProductAttention):
    """Megatron's core attention, which runs a second time in the backward pass."""

    def forward(self, *inputs: Any, **others: Any) -> torch.Tensor:
        """Attention as Megatron's."""
        return maybe_recomputed(self.recomputes_core and self.training, partial(super().forward, **others), *inputs)


class SdpaAttention(AttentionPerChunk, DotProductAttention):
    """Megatron's core attention on torch's fused kernel: no [s, s'] scores are kept, chunks may have a prefix, and the
    sequence may be cut over a context-parallel group.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *args: Any,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Megatron's own arguments; ``k_channels`` and ``v_channels`` are multi-latent attention's, and follow from
        the tensors here.
        """
        # Stock refuses context parallelism because its forward sees one rank's keys only.
        on_one_rank = copy(config)
        on_one_rank.context_parallel_size = 1
        super().__init__(on_one_rank, *args, **kwargs)
        self.config = config

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """Causal attention, or with the mask where there is one.

        Args:
            query: [s, b, n, k].
            key: [s, b, g, k].
            value: [s, b, g, v].
            attention_mask: [b or 1, 1, s, S], True where attention is not allowed, or None.
            packed_seq_params: the documents of samples laid end to end, in Megatron's own layers, whose queries, keys
                and values have no dimension b then. In the overlapping layers documents come with the chunk.

        Returns:
            [s, b, n * v].
        """
        assert attention_bias is None, "stock's local attention takes none either"
        if packed_seq_params is not None:
            return self._attend_end_to_end(query, key, value, packed_seq_params)
        documents = None if self.chunk is None else self.chunk.documents
        assert documents is None or attention_mask is None
        if self.config.context_parallel_size > 1:
            assert self.chunk is None or self.chunk.earlier is None, "refused when the plan was chosen"
            inputs = query, key, value, attention_mask, documents
            # On one rank the fused kernel keeps its inputs and its output, so there is nothing to recompute.
            return maybe_recomputed(self.recomputes_core and self.training, self._attend_across_ranks, *inputs)
        if self.chunk is not None and self.chunk.earlier is not None:
            key, value = self.chunk.with_earlier(self.layer_number, key, value, self.recomputed)
        return self._attend(query, key, value, attention_mask, documents)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        documents: Documents | None,
    ) -> torch.Tensor:
        """Attention of the last of the positions that keys [s', b, g, k] and values [s', b, g, v] have; [s, b, n * v].

        Args:
            attention_mask: [b or 1, 1, s, s'] or None.
            documents: the documents of the samples; None where a sample is one.
        """
        if documents is None:
            return self._attend_with_mask(query, key, value, attention_mask)
        dropout = self.training and self.attention_dropout.p > 0
        if query.device.type == "cuda" and query.dtype in (torch.float16, torch.bfloat16) and not dropout:
            return self._attend_to_documents(query, key, value, documents)
        # Else torch has no kernel for sequences of several lengths.
        return documents.attend(query, key, value, self._attend_with_mask)

    def _attend_end_to_end(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: PackedSeqParams
    ) -> torch.Tensor:
        """Attention inside documents, [s, n * v] of queries [s, n, k], keys [s, g, k] and values [s, g, v]."""
        assert self.chunk is None
        assert packed.cu_seqlens_q is not None
        assert self.config.context_parallel_size == 1, "refused before the model was built"
        documents = document_reader().end_to_end(packed.cu_seqlens_q.diff().tolist())
        query, key, value = (tensor.unsqueeze(1) for tensor in (query, key, value))
        return self._attend(query, key, value, None, documents).squeeze(1)

    def _attend_to_documents(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: Documents
    ) -> torch.Tensor:
        """As :meth:`_attend`, in one kernel."""
        num_positions, num_samples = query.shape[:2]
        first = key.size(0) - num_positions
        bounds = documents.bounds(first, key.size(0), query.device)
        value_channels = value.size(-1)
        # The kernel takes heads of one size; multi-latent attention's values are narrower.
        value = torch.nn.functional.pad(value, (0, key.size(-1) - value_channels))
        queries_per_key = query.size(2) // key.size(2)
        groups: dict[str, Any] = {}
        if queries_per_key > 1 and _KERNEL_TAKES_GROUPS:
            groups["enable_gqa"] = True
        elif queries_per_key > 1:
            key, value = (tensor.repeat_interleave(queries_per_key, dim=2) for tensor in (key, value))
        context = varlen_attn(
            query.transpose(0, 1).flatten(0, 1),
            documents.keys_in_order(key, first),
            documents.keys_in_order(value, first),
            bounds.query_ends,
            bounds.key_ends,
            bounds.most_queries,
            bounds.most_keys,
            scale=self._scale(),
            window_size=(-1, 0),  # causal; the last query sees all keys
            **groups,
        )
        assert isinstance(context, torch.Tensor)
        context = context[..., :value_channels].view(num_samples, num_positions, query.size(2), value_channels)
        return context.transpose(0, 1).flatten(2)

    def _attend_with_mask(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """As :meth:`_attend`, to all positions up to a query's own that the mask does not exclude."""
        mask: Any = None if attention_mask is None else ~attention_mask
        if mask is None and query.size(0) < key.size(0):
            mask = _causal_mask(query, key.size(0))
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        with self._random_state():
            context = scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=mask,
                dropout_p=self.attention_dropout.p if self.training else 0.0,
                is_causal=mask is None,
                scale=self._scale(),
                enable_gqa=query.size(1) != key.size(1),
            )
        return context.permute(2, 0, 1, 3).flatten(2)

    def _attend_across_ranks(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        documents: Documents | None,
    ) -> torch.Tensor:
        """Attention of this rank's two slices to all positions up to theirs, [s, b, n * v].

        Args:
            attention_mask: [b or 1, 1, s, S] or None; none of Megatron's allows a later position.
            documents: the documents of the samples; None where a sample is one.
        """
        group = self.pg_collection.cp
        both = gather_positions(torch.cat([key, value], dim=-1), group)
        keys, values = both.split([key.size(-1), value.size(-1)], dim=-1)
        masks: Sequence[torch.Tensor | None] = [None, None]
        if attention_mask is not None:
            masks = attention_mask.chunk(2, dim=2)
        context = []
        for number, part, mask in zip(own_slices(group), query.chunk(2), masks, strict=True):
            seen = (number + 1) * part.size(0)
            mask = None if mask is None else mask[..., :seen]
            context.append(self._attend(part, keys[:seen], values[:seen], mask, documents))
        return torch.cat(context)

    def _scale(self) -> float:
        # Query-key layer scaling divides the scores by the layer's number and multiplies them again in fp32.
        return float(self.softmax_scale * (self.scale_mask_softmax.scale or 1.0))

    @contextmanager
    def _random_state(self) -> Iterator[None]:
        """Dropout draws from the state that stock's dropout draws from."""
        if self.training and self.attention_dropout.p > 0 and not self.config.sequence_parallel:
            with tensor_parallel.get_cuda_rng_tracker().fork():
                yield
        else:
            yield


def own_slices(group: dist.ProcessGroup) -> tuple[int, int]:
    """Numbers of this rank's two slices, in the order in which it holds them."""
    return group.rank(), 2 * group.size() - 1 - group.rank()


def gather_positions(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """All positions in their order, [S, ...] of each rank's [s, ...] with s = S / N.

    Collective, and so is its backward pass, which sums the gradients that all ranks have for this one's positions.
    """
    slices = gather_from_sequence_parallel_region(part, group=group).chunk(2 * group.size())
    return torch.cat([*slices[0::2], *reversed(slices[1::2])])


def _causal_mask(query: torch.Tensor, num_keys: int) -> torch.Tensor:
    """The last query sees all keys, the one before it all but one, and so on; True where attention is allowed.

    Args:
        query: [s, ...].
    """
    num_queries = query.size(0)
    if on_cuda(query):
        return causal_lower_right(num_queries, num_keys)  # the flash kernel's own, never materialised
    return torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device).tril(num_keys - num_queries)
