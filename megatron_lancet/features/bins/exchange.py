"""Sends the samples of a step to the ranks that compute them: one all-gather of lengths, one all-to-all of tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import torch
import torch.distributed as dist

from megatron_lancet.features.bins.batches import Document
from megatron_lancet.planning.documents.bins import Dealing


@dataclass(frozen=True)
class Exchange:
    """A data-parallel group.

    Attributes:
        group: its ranks draw different samples, and all of them as many.
        device: where the group's messages are.
    """

    group: dist.ProcessGroup
    device: torch.device

    @property
    def rank(self) -> int:
        """Number of this rank in the group."""
        return self.group.rank()

    def positions_of_all(self, documents: Sequence[Document]) -> list[list[int]]:
        """Positions of the samples that each rank has drawn. Collective."""
        own = torch.tensor([document.num_positions for document in documents], device=self.device)
        every = [torch.empty_like(own) for _ in range(self.group.size())]
        dist.all_gather(every, own, group=self.group)
        return [lengths.tolist() for lengths in every]

    def dealt(self, drawn: Sequence[Document], positions: Sequence[Sequence[int]], dealing: Dealing) -> list[Document]:
        """The samples of this rank's bins, ascending by their numbers. Collective.

        Args:
            drawn: this rank's samples.
            positions: of all ranks' samples.
            dealing: of these samples; the same on all ranks.
        """
        rank, first = self.rank, list(accumulate((len(lengths) for lengths in positions), initial=0))
        tokens = [length + 1 for length in chain.from_iterable(positions)]
        target = {index: owner for owner, bins in enumerate(dealing.bins) for index in chain.from_iterable(bins)}
        own = range(first[rank], first[rank + 1])
        sent = sorted(own, key=lambda index: (target[index], index))
        received = sorted(chain.from_iterable(dealing.bins[rank]))
        ranks = range(self.group.size())
        num_sent = [sum(tokens[index] for index in own if target[index] == to) for to in ranks]
        num_received = [
            sum(tokens[index] for index in received if first[source] <= index < first[source + 1]) for source in ranks
        ]
        parts = [_encoded(drawn[index - first[rank]]) for index in sent]
        message = torch.cat(parts).to(self.device) if parts else torch.empty(0, dtype=torch.int64, device=self.device)
        arrived = torch.empty(sum(num_received), dtype=message.dtype, device=self.device)
        dist.all_to_all_single(arrived, message, num_received, num_sent, group=self.group)
        # Ranks are in the order of their samples' numbers, so what arrives is ascending.
        return [_decoded(part) for part in arrived.cpu().split([tokens[index] for index in received])]


def _encoded(document: Document) -> torch.Tensor:
    """Tokens [n + 1] int64, whose last bit says whether they count as labels."""
    return document.tokens.to(torch.int64) * 2 + document.is_label


def _decoded(part: torch.Tensor) -> Document:
    return Document((part // 2).to(torch.int32), (part % 2).to(torch.uint8))
