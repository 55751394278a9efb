"""The documents in the samples of a micro-batch, or in a part of it.

Legend of shapes: S positions of a sequence, B samples, s positions of a chunk.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from megatron.core.transformer import TransformerConfig

from megatron_lancet.errors import UsageError
from megatron_lancet.features.documents.balance import balancing_loss
from megatron_lancet.model.samples import Attend
from megatron_lancet.planning.documents.cost import DocumentCost
from megatron_lancet.planning.documents.cuts import cut_sizes
from megatron_lancet.runtime.device import to_device
from megatron_lancet.schedule.plan import ChunkDim, Segment


class Part(NamedTuple):
    """The part of a document that lies between two positions of a sequence.

    Attributes:
        document: number of the document in its sample.
        start: first position of the document.
        first: first position of the part.
        stop: the position behind its last one.
    """

    document: int
    start: int
    first: int
    stop: int


class Bounds(NamedTuple):
    """Arguments of kernels for sequences of several lengths, the parts of the samples one after the other.

    Attributes:
        query_ends: ends of the parts, with a 0 in front, [parts + 1] int32.
        key_ends: the same for parts with what precedes them in their documents.
        most_queries: the longest part.
        most_keys: the longest one with what precedes it.
    """

    query_ends: torch.Tensor
    key_ends: torch.Tensor
    most_queries: int
    most_keys: int


@dataclass(frozen=True)
class Documents:
    """The documents of some samples.

    Attributes:
        lengths: per sample the lengths of its documents, in order; S in sum.
        are_sequences: whether the balancing loss of sequences takes each document for one, not each sample.
        cost: what positions cost, by which sequences are cut into chunks; None for chunks of equal sizes.
        has_fill: whether the last document of the last sample only fills it up: the balancing loss leaves it out.
    """

    lengths: tuple[tuple[int, ...], ...]
    are_sequences: bool = False
    cost: DocumentCost | None = None
    has_fill: bool = False
    _made: dict[object, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def num_positions(self) -> int:
        """Positions of a sample, S."""
        return sum(self.lengths[0])

    @property
    def longest(self) -> int:
        """Positions of the longest document."""
        return max(map(max, self.lengths))

    def once[T](self, key: object, make: Callable[[], T]) -> T:
        """The result of ``make`` at the first call with this key: layers need the same tensors."""
        if key not in self._made:
            self._made[key] = make()
        found: T = self._made[key]
        return found

    def of_samples(self, first: int, number: int) -> "Documents":
        """The documents of ``number`` samples from sample ``first`` on."""
        own = self.lengths[first : first + number]
        return Documents(own, self.are_sequences, self.cost, self.has_fill and first + number == len(self.lengths))

    def chunk_sizes(self, segment: Segment) -> list[int] | None:
        """Sizes of the chunks of a sequence, of near equal cost; None for chunks of equal sizes."""
        if self.cost is None or segment.chunk_dim is ChunkDim.BATCH:
            return None
        return cut_sizes(self.lengths, segment.num_chunks, self.cost, segment.chunk_multiple)

    def rotary_at(self, rotary_pos_emb: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotary embedding of positions, [s, b, 1, R].

        Args:
            rotary_pos_emb: of positions from 0 on, [longest or more, 1, 1, R].
            positions: [s, b].

        Raises:
            UsageError: there are too few of them.
        """
        if self.longest > rotary_pos_emb.size(0):
            raise UsageError(
                f"a packed micro-batch has a document of {self.longest} tokens, and its max_seqlen_q is "
                f"{rotary_pos_emb.size(0)}. Set it to the length of the longest document or above."
            )
        return rotary_pos_emb[:, 0, 0][positions].unsqueeze(2)

    def keys_in_order(self, tensor: torch.Tensor, first: int) -> torch.Tensor:
        """See :func:`keys_in_order`."""
        return keys_in_order(self, tensor, first)

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attend: Attend) -> torch.Tensor:
        """See :func:`attend_by_document`."""
        return attend_by_document(self, query, key, value, attend)

    def balancing_loss(
        self,
        scores_TE: torch.Tensor,
        map_TE: torch.Tensor,
        config: TransformerConfig,
        group: torch.distributed.ProcessGroup,
        coeff: float,
    ) -> torch.Tensor:
        """See :func:`~megatron_lancet.features.documents.balance.balancing_loss`."""
        return balancing_loss(scores_TE, map_TE, self, config, group, coeff)

    def positions(self) -> torch.Tensor:
        """The position of each token in its document, [S, B] on the host."""
        samples = []
        for lengths in self.lengths:
            starts = torch.tensor([0, *accumulate(lengths[:-1])])
            samples.append(torch.arange(sum(lengths)) - starts.repeat_interleave(torch.tensor(lengths)))
        return torch.stack(samples, dim=1)

    def parts(self, first: int, stop: int) -> list[list[Part]]:
        """Per sample the parts of documents from position ``first`` to the one before ``stop``, in order."""
        parts = []
        for lengths in self.lengths:
            bounds = enumerate(pairwise(accumulate(lengths, initial=0)))
            parts.append(
                [
                    Part(number, start, max(start, first), min(end, stop))
                    for number, (start, end) in bounds
                    if start < stop and end > first
                ]
            )
        return parts

    def bounds(self, first: int, stop: int, device: torch.device) -> Bounds:
        """Bounds of :meth:`parts` on a device; copied there once, without a wait."""

        def make() -> Bounds:
            parts = [part for sample in self.parts(first, stop) for part in sample]
            queries = [part.stop - part.first for part in parts]
            keys = [part.stop - part.start for part in parts]
            query_ends, key_ends = (
                to_device(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32), device)
                for lengths in (queries, keys)
            )
            return Bounds(query_ends, key_ends, max(queries), max(keys))

        return self.once(("bounds", first, stop, device), make)


def attend_by_document(
    documents: Documents, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attend: Attend
) -> torch.Tensor:
    """Attention one document after the other; each sees what precedes it in its own document only.

    Samples with the same documents go through ``attend`` together.

    Args:
        query: [s, b, n, k], of the last positions that keys and values have.
        key: [s', b, g, k], from the sequence's first position on.
        value: [s', b, g, v].

    Returns:
        [s, b, n * v].
    """
    stop = key.size(0)
    parts = documents.parts(stop - query.size(0), stop)
    if all(others == parts[0] for others in parts[1:]):
        return _attend_in_sample(parts[0], query, key, value, attend)
    samples = zip(parts, query.split(1, dim=1), key.split(1, dim=1), value.split(1, dim=1), strict=True)
    return torch.cat([_attend_in_sample(*sample, attend) for sample in samples], dim=1)


def _attend_in_sample(
    parts: Sequence[Part], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attend: Attend
) -> torch.Tensor:
    queries = query.split([part.stop - part.first for part in parts])
    # One split node: its backward writes each part's gradient once, slices would add one padded tensor per document.
    with_start = [parts[0].start, *(part.stop - part.start for part in parts)]
    keys, values = (tensor.split(with_start)[1:] for tensor in (key, value))
    context = [attend(*document) for document in zip(queries, keys, values, strict=True)]
    return context[0] if len(context) == 1 else torch.cat(context)


def keys_in_order(documents: Documents, tensor: torch.Tensor, first: int) -> torch.Tensor:
    """Keys or values that positions from ``first`` on see, sample after sample, without keys of earlier documents.

    Args:
        tensor: [s', b, ...], from the sequence's first position on.

    Returns:
        [keys, ...], as :attr:`Bounds.key_ends` counts them.
    """
    parts = documents.parts(first, tensor.size(0))
    samples = [
        sample.split([own[0].start, tensor.size(0) - own[0].start])[1]
        for sample, own in zip(tensor.unbind(dim=1), parts, strict=True)
    ]
    return samples[0] if len(samples) == 1 else torch.cat(samples)
