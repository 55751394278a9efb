"""The balancing loss of sequences where each document is one.

Megatron's ``seq_aux_loss`` is a mean over samples; a document takes a sample's place here, whatever its length.
DeepSeek-V3's report (section 2.1.2) defines the loss of one sequence.

Legend of shapes: s positions on this rank, B samples, T = s * B tokens, E experts, D documents, P parts of documents.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from megatron.core.transformer import TransformerConfig

from megatron_lancet.model.attention.slices import own_positions
from megatron_lancet.runtime.device import to_device

if TYPE_CHECKING:
    from megatron_lancet.features.documents.lengths import Documents


@dataclass(frozen=True)
class DocumentParts:
    """The rank's parts of the documents of a micro-batch.

    Attributes:
        lengths: of the parts, sample after sample, [P] on the tokens' device.
        documents: number of each part's document in the micro-batch, [P].
        document_lengths: positions of each document on all ranks, [D] fp32.
    """

    lengths: torch.Tensor
    documents: torch.Tensor
    document_lengths: torch.Tensor

    @staticmethod
    def of(documents: "Documents", ranges: Sequence[tuple[int, int]], device: torch.device) -> "DocumentParts":
        """
        Args:
            ranges: positions on this rank, in their order there: first ones, and those behind the last ones.
        """
        in_ranges = [documents.parts(*one) for one in ranges]
        lengths, numbers, before = [], [], 0
        for sample, own in enumerate(documents.lengths):
            parts = [part for in_range in in_ranges for part in in_range[sample]]
            lengths += [part.stop - part.first for part in parts]
            numbers += [before + part.document for part in parts]
            before += len(own)
        of_documents = torch.tensor([length for own in documents.lengths for length in own], dtype=torch.float32)
        on_device = (to_device(one, device) for one in (torch.tensor(lengths), torch.tensor(numbers), of_documents))
        return DocumentParts(*on_device)

    def sums(self, tokens_TE: torch.Tensor, num_samples: int) -> torch.Tensor:
        """Sums over the tokens of each document on this rank, [D, E].

        Args:
            tokens_TE: position after position, as hidden states [s, B, H] have them.
        """
        num_experts = tokens_TE.size(-1)
        by_sample = tokens_TE.view(-1, num_samples, num_experts).transpose(0, 1).reshape(-1, num_experts)
        of_parts = torch.segment_reduce(by_sample, "sum", lengths=self.lengths, unsafe=True)
        of_documents = of_parts.new_zeros(len(self.document_lengths), num_experts)
        # At most two parts of a document are added, so the result is the same in any order.
        return of_documents.index_add(0, self.documents, of_parts)


def ranges_on_rank(num_positions: int, config: TransformerConfig) -> list[tuple[int, int]]:
    """Positions of a sequence that this rank's routers see: first ones, and those behind the last ones."""
    ranges = [(0, num_positions)]
    if config.context_parallel_size > 1:
        ranges = own_positions(num_positions, config)
    if not config.sequence_parallel:
        return ranges
    num_ranks, rank = config.tensor_model_parallel_size, parallel_state.get_tensor_model_parallel_rank()
    size = sum(stop - start for start, stop in ranges) // num_ranks
    first, found = rank * size, []
    for start, stop in ranges:
        own = max(start, start + first), min(stop, start + first + size)
        if own[0] < own[1]:
            found.append(own)
        size, first = size - max(0, own[1] - own[0]), max(0, first - (stop - start))
    return found


def balancing_loss(
    scores_TE: torch.Tensor,
    map_TE: torch.Tensor,
    documents: "Documents",
    config: TransformerConfig,
    group: torch.distributed.ProcessGroup,
    coeff: float,
) -> torch.Tensor:
    """The mean over documents of the loss that Megatron has for a sequence: the share of one rank's tokens. Collective.

    Args:
        scores_TE: scores of this rank's tokens, position after position.
        map_TE: which experts each token chooses, bool.
        group: the ranks that have tokens of the same micro-batch.
    """
    assert config.sequence_parallel or config.tensor_model_parallel_size == 1, "Megatron refuses it for MoE"
    num_samples, (num_experts, topk) = len(documents.lengths), (scores_TE.size(-1), config.moe_router_topk)
    ranges = ranges_on_rank(documents.num_positions, config)
    key = "parts", tuple(ranges), scores_TE.device
    parts = documents.once(key, lambda: DocumentParts.of(documents, ranges, scores_TE.device))
    num_chosen = reduce_from_tensor_model_parallel_region(parts.sums(map_TE.to(scores_TE.dtype), num_samples), group)
    of_documents = (num_chosen * parts.sums(scores_TE, num_samples)).sum(dim=1) / parts.document_lengths**2
    of_sequences = of_documents[:-1] if documents.has_fill else of_documents
    return of_sequences.mean() * (num_experts * coeff / topk)
