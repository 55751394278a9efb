"""The interface of the documents of packed samples for the layers; an optional part of the model makes them.

Legend of shapes: S positions of a sequence, B samples, s positions of a chunk, b samples of a chunk, H hidden size, R
channels of a rotary embedding, T tokens, E experts.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig

from megatron_lancet.schedule.plan import Segment

type Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""From queries [s, b, n, k], keys [s', b, g, k] and values [s', b, g, v] to their context [s, b, n * v]; queries are at
the last positions of the keys."""


class Bounds(Protocol):
    """The bounds of documents for kernels that take sequences of several lengths, sample after sample.

    Attributes:
        query_ends: ends of the parts, with a 0 in front, [parts + 1] int32.
        key_ends: the same for parts with the preceding positions of their documents.
        most_queries: the longest part.
        most_keys: the longest part with the preceding positions of its document.
    """

    @property
    def query_ends(self) -> torch.Tensor: ...
    @property
    def key_ends(self) -> torch.Tensor: ...
    @property
    def most_queries(self) -> int: ...
    @property
    def most_keys(self) -> int: ...


class Documents(Protocol):
    """The documents of some samples.

    Attributes:
        are_sequences: whether the balancing loss of sequences takes each document for one, not each sample.
        num_positions: positions of a sample, S.
    """

    @property
    def are_sequences(self) -> bool: ...
    @property
    def num_positions(self) -> int: ...

    def of_samples(self, first: int, number: int) -> "Documents":
        """The documents of ``number`` samples from sample ``first`` on."""

    def chunk_sizes(self, segment: Segment) -> list[int] | None:
        """Sizes of chunks of near equal cost; None for chunks of equal sizes."""

    def rotary_at(self, rotary_pos_emb: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotary embedding of positions [s, b] in their documents, [s, b, 1, R]."""

    def bounds(self, first: int, stop: int, device: torch.device) -> Bounds:
        """Bounds of the documents from position ``first`` to the one before ``stop``, on a device."""

    def keys_in_order(self, tensor: torch.Tensor, first: int) -> torch.Tensor:
        """Keys or values [s', b, ...] that positions from ``first`` on see, sample after sample: [keys, ...]."""

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Attention one document after the other, [s, b, n * v]."""

    def balancing_loss(
        self,
        scores_TE: torch.Tensor,
        map_TE: torch.Tensor,
        config: TransformerConfig,
        group: torch.distributed.ProcessGroup,
        coeff: float,
    ) -> torch.Tensor:
        """The mean over documents of Megatron's loss for a sequence: the share of one rank's tokens. Collective."""


class PackedMicroBatch(Protocol):
    """A micro-batch of packed documents.

    Attributes:
        documents: the documents of its samples.
        positions: position of each token in its document, [s, B].
        is_flat: whether its hidden states came as [B * S, 1, H], sample after sample.
    """

    @property
    def documents(self) -> Documents: ...
    @property
    def positions(self) -> torch.Tensor: ...
    @property
    def is_flat(self) -> bool: ...

    def unflattened(self, hidden: torch.Tensor) -> torch.Tensor:
        """[s, B, H] of what the layers got."""

    def flattened(self, hidden: torch.Tensor) -> torch.Tensor:
        """[s, B, H] as the layers got it."""

    def rotary(self, rotary_pos_emb: torch.Tensor | None) -> torch.Tensor | None:
        """The embedding of each position, [s, B, 1, R]."""


class DocumentReader(Protocol):
    """Reads the documents of micro-batches."""

    def read(self, params: PackedSeqParams, hidden: torch.Tensor, config: TransformerConfig) -> PackedMicroBatch:
        """Reads the lengths of documents; the host waits for them if they are on a device.

        Args:
            params: with the documents of all samples, sample after sample.
            hidden: [s, B, H], or [B * S, 1, H].

        Raises:
            UsageError: they are no such parameters, or do not fit ``hidden``.
        """

    def end_to_end(self, lengths: Sequence[int]) -> Documents:
        """The documents of samples laid end to end."""
