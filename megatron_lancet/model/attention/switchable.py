"""Chooses a layer's core attention by its plan: Megatron's, or attention whose chunks see earlier chunks."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention

from megatron_lancet.errors import UsageError
from megatron_lancet.model.adopt import adopt
from megatron_lancet.model.attention.sdpa import AttentionPerChunk, RecomputedAttention, SdpaAttention, sdpa_blockers
from megatron_lancet.model.chunking import Chunk
from megatron_lancet.registry import model_parts


class _PositionedRotary(RotaryEmbedding):
    """Rotary embedding of multi-latent attention, which asks for positions from 0 on: of the chunk's positions."""

    chunk: Chunk | None = None

    def forward(self, max_seq_len: int, offset: int = 0, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.chunk is not None and self.chunk.documents is not None:
            return _at_positions(super().forward(self.chunk.documents.num_positions, packed_seq=True), self.chunk)
        return super().forward(max_seq_len, offset + (0 if self.chunk is None else self.chunk.start), *args, **kwargs)


class _PositionedYarnRotary(YarnRotaryEmbedding):
    """Like :class:`_PositionedRotary`, for YaRN."""

    chunk: Chunk | None = None

    def forward(self, max_seq_len: int, offset: int = 0, *args: Any, **kwargs: Any) -> Any:
        if self.chunk is not None and self.chunk.documents is not None:
            embedding, scale = super().forward(self.chunk.documents.num_positions, packed_seq=True)
            return _at_positions(embedding, self.chunk), scale
        return super().forward(max_seq_len, offset + (0 if self.chunk is None else self.chunk.start), *args, **kwargs)

    def get_cached_cos_sin(
        self, seq_len: int, offset: int = 0, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns cosines and sines for the fused kernel; ``--apply-rope-fusion`` calls it instead of ``forward``."""
        chunk = self.chunk
        if chunk is None:
            return self._cached_cos_sin(seq_len, offset, *args, **kwargs)
        assert chunk.documents is None, "document attention does not fuse it"
        # Megatron caches them from the offset on. ``forward`` computes them and must not add a chunk's start.
        self.chunk = None
        try:
            cos, sin = self._cached_cos_sin(chunk.start + seq_len, offset, *args, **kwargs)
        finally:
            self.chunk = chunk
        return cos[chunk.start :], sin[chunk.start :]

    def _cached_cos_sin(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        found: tuple[torch.Tensor, torch.Tensor] = super().get_cached_cos_sin(*args, **kwargs)
        return found


def _at_positions(embedding: torch.Tensor, chunk: Chunk) -> torch.Tensor:
    assert chunk.documents is not None
    assert chunk.positions is not None
    return chunk.documents.rotary_at(embedding, chunk.positions)


class SwitchableAttention:
    """Switches a self-attention that Megatron built to a core attention for sequence chunks, and back.

    With local layers that is torch's fused kernel. Transformer Engine's core attention takes both kinds of chunks, so
    there only the rotary embedding changes.
    """

    def __init__(self, attention: torch.nn.Module, recomputed: bool) -> None:
        """
        Args:
            recomputed: whether it runs again in the backward pass.
        """
        assert isinstance(attention, Attention)
        self._attention = attention
        self._recomputed = recomputed
        for part in model_parts():
            part.adopt_attention(attention.core_attention)
        core = attention.core_attention
        self._is_te = isinstance(core, AttentionPerChunk) and not isinstance(core, SdpaAttention)
        if attention.checkpoint_core_attention and type(core) is DotProductAttention:
            adopt(core, RecomputedAttention)
        self._core_class = type(core)
        if isinstance(core, AttentionPerChunk):
            core.recomputes_core, core.recomputed = attention.checkpoint_core_attention, recomputed
            attention.checkpoint_core_attention = False  # ours now
        # Multi-latent attention has its own; other attentions get their positions as an argument.
        self._rotary = (
            getattr(attention, "rotary_pos_emb", None) if isinstance(attention, MultiLatentAttention) else None
        )
        self._rotary_class = type(self._rotary)

    def begin_documents(self) -> None:
        """Prepares it for packed documents.

        Raises:
            UsageError: its kernel does not take them.
        """
        config = self._attention.config
        if self._is_te and config.context_parallel_size > 1:
            raise UsageError(
                "packed documents do not work with Transformer Engine's attention and --context-parallel-size "
                f"{config.context_parallel_size}: it expects each document cut over the ranks, and samples are. Pass "
                "--transformer-impl local."
            )
        # Positions differ from sample to sample, which the fused kernel of the rotary embedding does not take.
        if config.apply_rope_fusion:
            self._attention.config = copy(config)
            self._attention.config.apply_rope_fusion = False

    def check(self, cuts_documents: bool) -> None:
        """
        Args:
            cuts_documents: whether sequence chunks may cut packed documents.

        Raises:
            UsageError: the attention needs something that the kernel for sequence chunks lacks.
        """
        if self._is_te and cuts_documents:
            raise UsageError(
                "sequence chunks of packed documents do not work with Transformer Engine's attention: its kernels for "
                "several lengths give a document no keys of an earlier chunk. Pass --lancet-chunk-dim batch, or "
                "--transformer-impl local."
            )
        config = self._attention.config
        if self._is_te and (config.fp8_dot_product_attention or config.fp8_multi_head_attention):
            raise UsageError(
                "sequence chunks and packed samples do not work with attention in fp8 (fp8_dot_product_attention, "
                "fp8_multi_head_attention): Transformer Engine has no such kernel. Pass --lancet-chunk-dim batch, or "
                "turn it off."
            )
        for flag in () if self._is_te else sdpa_blockers(config):
            raise UsageError(
                f"{flag} does not work with sequence chunks or --lancet-attention sdpa: the fused kernel lacks it. "
                "Drop it, or pass --lancet-chunk-dim batch --lancet-attention stock."
            )

    def use_prefixed(self) -> None:
        """Switches to the core attention that sequence chunks and documents need; :meth:`check` found that it can.

        Raises:
            UsageError: the attention is of an unknown class.
        """
        if not self._is_te:
            if not isinstance(self._attention.core_attention, AttentionPerChunk):
                adopt(self._attention.core_attention, SdpaAttention)
            self._attention.core_attention.__class__ = SdpaAttention
            self._attention.core_attention.recomputed = self._recomputed
        if self._rotary is not None and not isinstance(self._rotary, _PositionedRotary | _PositionedYarnRotary):
            adopt(
                self._rotary, _PositionedYarnRotary if self._rotary_class is YarnRotaryEmbedding else _PositionedRotary
            )

    def use_built(self) -> None:
        """Switches back to what Megatron built."""
        self._attention.core_attention.__class__ = self._core_class
        if self._rotary is not None:
            self._rotary.__class__ = self._rotary_class


def at_positions(attention: torch.nn.Module, chunk: Chunk) -> AbstractContextManager[None]:
    """Inside, ``attention`` works on the positions of ``chunk``."""
    is_whole = chunk.earlier is None and chunk.documents is None
    return nullcontext() if is_whole else _at_positions_of(attention, chunk)


@contextmanager
def _at_positions_of(attention: torch.nn.Module, chunk: Chunk) -> Iterator[None]:
    core = attention.core_attention
    assert isinstance(core, AttentionPerChunk)
    rotary = getattr(attention, "rotary_pos_emb", None)
    core.chunk = chunk
    if isinstance(rotary, _PositionedRotary | _PositionedYarnRotary):
        rotary.chunk = chunk
    try:
        yield
    finally:
        core.chunk = None
        if isinstance(rotary, _PositionedRotary | _PositionedYarnRotary):
            rotary.chunk = None
