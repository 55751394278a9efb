"""Packed documents in a model: reads them, for attention, chunks and the balancing loss."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig

from megatron_lancet.features.documents.lengths import Documents
from megatron_lancet.features.documents.packed import PackedMicroBatch
from megatron_lancet.model.parts import ModelPart
from megatron_lancet.planning.documents.cost import DocumentCost
from megatron_lancet.planning.sizes.attention import tokens_per_pair


@dataclass(frozen=True)
class Reader:
    """Reads the documents of micro-batches.

    Attributes:
        cost: what positions cost, by which sequences are cut into chunks; None for chunks of equal sizes.
    """

    cost: DocumentCost | None = None

    def read(self, params: PackedSeqParams, hidden: torch.Tensor, config: TransformerConfig) -> PackedMicroBatch:
        """See :meth:`PackedMicroBatch.of`."""
        return PackedMicroBatch.of(params, hidden, config, self.cost)

    def end_to_end(self, lengths: Sequence[int]) -> Documents:
        """The documents of samples laid end to end."""
        return Documents((tuple(lengths),))


class _Documents(ModelPart):
    def document_reader(self, model: Any = None) -> Reader:
        """Reads documents with the cost of positions in a model, or without."""
        if model is None:
            return Reader()
        pattern = getattr(model, "hybrid_layer_pattern", None)
        return Reader(DocumentCost(tokens_per_pair(model.config, model.vocab_size, pattern)))


DOCUMENTS = _Documents()
