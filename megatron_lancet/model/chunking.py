"""Splits a micro-batch into chunks and concatenates the results.

Legend of shapes: S sequence length, B micro-batch size, s / b the same of a chunk, H hidden size.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate

import torch

from megatron_lancet.errors import UsageError
from megatron_lancet.model.attention.prefix import Prefix
from megatron_lancet.model.samples import Documents, PackedMicroBatch
from megatron_lancet.schedule.chunk_sizes import most_chunks
from megatron_lancet.schedule.plan import ChunkDim, Segment

_DIMS = {ChunkDim.SEQUENCE: 0, ChunkDim.BATCH: 1}
"""Dimension of hidden states [S, B, H] that is cut."""

KeysAndValues = defaultdict[int, tuple[Prefix, Prefix]]
"""Keys and values of the chunks so far, by layer number."""

type Rotary = torch.Tensor | tuple[Rotary | None, ...]
"""A rotary embedding or several: for queries and keys, or for local and global attention."""


@dataclass(frozen=True)
class Chunk:
    """A slice of one micro-batch.

    Attributes:
        index: place among the chunks of the micro-batch.
        num_chunks: how many there are.
        dim: dimension of hidden states [S, B, H] along which the micro-batch was cut.
        start: first position of a sequence chunk; 0 for the others.
        earlier: keys and values of a micro-batch's earlier positions, shared by its sequence chunks; None where
            attention needs no others.
        attention_mask: [b or 1, 1, S, S] or None, True where attention is not allowed.
        rotary_pos_emb: rotary embedding of the chunk's positions, [s, 1, 1, R], the same for all samples, or with
            documents [s, b, 1, R]; or a tuple of them. None if attention has its own, or none.
        attention_bias: added to the attention scores, [b or 1, 1 or n, S, S] with n heads, or None.
        documents: the documents of the chunk's samples, on uncut sequences; None where a sample is one.
        positions: with documents the position of each token in its own, [s, b].
        padding_mask: [s, b], True for padding tokens, which routers do not count; None without padding.
    """

    index: int
    num_chunks: int
    dim: int = _DIMS[ChunkDim.BATCH]
    start: int = 0
    earlier: KeysAndValues | None = field(default=None, repr=False)
    attention_mask: torch.Tensor | None = None
    rotary_pos_emb: Rotary | None = None
    attention_bias: torch.Tensor | None = None
    documents: Documents | None = None
    positions: torch.Tensor | None = None
    padding_mask: torch.Tensor | None = None

    @property
    def is_last(self) -> bool:
        """Whether this is the chunk after which a layer's router has seen the full micro-batch."""
        return self.index == self.num_chunks - 1

    def with_earlier(
        self, layer_number: int, key: torch.Tensor, value: torch.Tensor, recomputed: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns keys and values up to the chunk's last position, and keeps its own for later chunks.

        Args:
            layer_number: layer of the attention, in whose order chunks call.
            key: the chunk's own, [s, b, g, k].
            value: the chunk's own, [s, b, g, v].
            recomputed: whether the chunk calls a second time in the backward pass.
        """
        assert self.earlier is not None
        prefixes = self.earlier[layer_number]
        keep = not self.is_last or recomputed
        keys, values = (prefix.up_to(own, self.index, keep) for prefix, own in zip(prefixes, (key, value), strict=True))
        if not keep:
            del self.earlier[layer_number]
        return keys, values


def split_hidden(
    hidden_SBH: torch.Tensor, segment: Segment, documents: Documents | None = None
) -> Sequence[torch.Tensor]:
    """Splits a tensor [S, B, ...] into one contiguous [s, b, ...] per chunk.

    Args:
        documents: those by whose cost attention's chunks are cut; None for chunks of equal sizes.

    Raises:
        UsageError: there are fewer positions or samples than chunks.
    """
    if segment.num_chunks == 1:
        return [hidden_SBH]
    dim = _DIMS[segment.chunk_dim]
    # One split node: its backward writes each chunk's gradient once, slices would add k padded tensors.
    sizes = _chunk_sizes(hidden_SBH.size(dim), segment, documents)
    return [part.contiguous() for part in torch.split(hidden_SBH, sizes, dim=dim)]


def _chunk_sizes(size: int, segment: Segment, documents: Documents | None) -> list[int]:
    if segment.num_chunks > most_chunks(size, segment.chunk_multiple):
        units = "positions" if segment.chunk_dim is ChunkDim.SEQUENCE else "samples"
        raise UsageError(
            f"a micro-batch has {size} {units}, which make no {segment.num_chunks} chunks of multiples of "
            f"{segment.chunk_multiple}. Use fewer chunks, the other --lancet-chunk-dim or longer micro-batches."
        )
    by_cost = None if documents is None else documents.chunk_sizes(segment)
    return segment.chunk_sizes(size) if by_cost is None else by_cost


def merge_hidden(parts: Sequence[torch.Tensor], segment: Segment) -> torch.Tensor:
    """Concatenates what :func:`split_hidden` has split."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=_DIMS[segment.chunk_dim])


def split_rows(rows_TX: torch.Tensor, shape: torch.Size, segment: Segment) -> Sequence[torch.Tensor]:
    """Splits rows [S * B, X] of a tensor with first dimensions ``shape`` into [s * b, X] per chunk."""
    parts = split_hidden(rows_TX.view(*shape[:2], -1), segment)
    return [part.view(-1, rows_TX.size(-1)) for part in parts]


def unchunked_micro_batch(
    attention_mask: torch.Tensor | None = None,
    rotary_pos_emb: Rotary | None = None,
    attention_bias: torch.Tensor | None = None,
    packed: PackedMicroBatch | None = None,
    padding_mask: torch.Tensor | None = None,
) -> Chunk:
    """The only chunk of a micro-batch.

    Args:
        attention_mask: [B or 1, 1, S, S] or None.
        rotary_pos_emb: for positions from 0, [S or longest document, 1, 1, R], a tuple of them, or None.
        attention_bias: see :class:`Chunk`.
        packed: its documents; None where a sample is one.
        padding_mask: see :class:`Chunk`.
    """
    unchunked = Chunk(0, 1, attention_bias=attention_bias, padding_mask=padding_mask)
    if packed is None:
        return replace(unchunked, attention_mask=attention_mask, rotary_pos_emb=rotary_pos_emb)
    rotary_pos_emb = _rotary_at(rotary_pos_emb, packed)
    return replace(unchunked, rotary_pos_emb=rotary_pos_emb, documents=packed.documents, positions=packed.positions)


def _rotary_at(rotary: Rotary | None, packed: PackedMicroBatch) -> Rotary | None:
    """Returns a rotary embedding at each position of the documents; for a tuple, a tuple."""
    if isinstance(rotary, tuple):
        return tuple(_rotary_at(one, packed) for one in rotary)
    return packed.rotary(rotary)


def make_chunks(parts: Sequence[torch.Tensor], segment: Segment, unchunked: Chunk) -> Sequence[Chunk]:
    """Describes each chunk.

    Args:
        parts: hidden states of the chunks, from :func:`split_hidden`.
        unchunked: the micro-batch. With sequence chunks its mask is causal or not read: see ``attention/masks.py``.
    """
    sizes = [part.size(_DIMS[segment.chunk_dim]) for part in parts]
    starts = list(accumulate(sizes[:-1], initial=0))
    num, dim = len(parts), _DIMS[segment.chunk_dim]
    if num == 1:
        return [unchunked]
    if segment.chunk_dim is ChunkDim.BATCH:
        along_samples = partial(_split_samples, sizes=sizes, dim=1)
        masks, biases = (_split_samples(t, sizes, dim=0) for t in (unchunked.attention_mask, unchunked.attention_bias))
        rotary = _split_rotary(unchunked.rotary_pos_emb, along_samples)
        documents: Sequence[Documents | None] = [None] * num
        if unchunked.documents is not None:
            documents = [unchunked.documents.of_samples(start, size) for start, size in zip(starts, sizes, strict=True)]
        positions, padding = along_samples(unchunked.positions), along_samples(unchunked.padding_mask)
        return [
            Chunk(i, num, dim, 0, None, masks[i], rotary[i], biases[i], documents[i], positions[i], padding[i])
            for i in range(num)
        ]
    num_positions = sum(sizes)
    earlier: KeysAndValues = defaultdict(lambda: (Prefix(num_positions), Prefix(num_positions)))
    along_positions = partial(_split_positions, sizes=sizes)
    rotary = _split_rotary(unchunked.rotary_pos_emb, along_positions)
    positions, padding = along_positions(unchunked.positions), along_positions(unchunked.padding_mask)
    return [
        Chunk(
            index,
            num,
            dim,
            start,
            earlier,
            rotary_pos_emb=rotary[index],
            attention_bias=unchunked.attention_bias,
            documents=unchunked.documents,
            positions=positions[index],
            padding_mask=padding[index],
        )
        for index, start in enumerate(starts)
    ]


def _split_samples(tensor: torch.Tensor | None, sizes: Sequence[int], dim: int) -> Sequence[torch.Tensor | None]:
    """A tensor's part of each batch chunk; one that is the same for all samples, of size 1, is shared."""
    if tensor is None or tensor.size(dim) != sum(sizes):
        return [tensor] * len(sizes)
    return list(torch.split(tensor, list(sizes), dim=dim))


def _split_positions(tensor: torch.Tensor | None, sizes: Sequence[int]) -> Sequence[torch.Tensor | None]:
    """Splits a tensor into the positions of each sequence chunk."""
    ends = list(accumulate(sizes))
    return [None if tensor is None else tensor[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def _split_rotary(
    rotary: Rotary | None, split: Callable[[torch.Tensor | None], Sequence[torch.Tensor | None]]
) -> Sequence[Rotary | None]:
    """Splits a rotary embedding into the chunks' parts; for a tuple, into tuples."""
    if isinstance(rotary, tuple):
        return list(zip(*(_split_rotary(one, split) for one in rotary), strict=True))
    return split(rotary)
