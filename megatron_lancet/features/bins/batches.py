"""Batches of a model, made of the samples of a bin.

Legend of shapes: S positions of a bin, n bounds of its documents.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

type Batch = dict[str, torch.Tensor]
"""tokens, labels, position_ids [1, S] int64, loss_mask [1, S] float32, cu_seqlens [1, n] and max_seqlen [1] int32,
has_fill [1] bool: whether the last document only fills the bin up."""


class Document(NamedTuple):
    """A sample.

    Attributes:
        tokens: [n + 1] int32.
        is_label: [n + 1] uint8, 1 where a token counts as a label.
    """

    tokens: torch.Tensor
    is_label: torch.Tensor

    @property
    def num_positions(self) -> int:
        """Positions that the model computes: each token but the last is read, each but the first predicted."""
        return self.tokens.numel() - 1


def packed(documents: Sequence[Document], multiple: int, at_least: int) -> Batch:
    """Documents one after the other in a single sample, whose bounds they are.

    Args:
        multiple: the positions are filled up to a multiple of this number; what fills is a document without labels,
            all of whose positions are 0: it may be longer than any document.
        at_least: fewest positions, a multiple of ``multiple``.
    """
    in_use = [document.num_positions for document in documents]
    num_fill = max(-(-sum(in_use) // multiple) * multiple, at_least) - sum(in_use)
    sizes = [*in_use, num_fill] if num_fill else in_use
    fill = torch.zeros(num_fill, dtype=torch.int64)

    def joined(parts: Iterable[torch.Tensor]) -> torch.Tensor:
        return torch.cat([*parts, fill])[None]

    return {
        "tokens": joined(document.tokens[:-1] for document in documents),
        "labels": joined(document.tokens[1:] for document in documents),
        "loss_mask": joined(document.is_label[1:] for document in documents).float(),
        "position_ids": joined(map(torch.arange, in_use)),
        "cu_seqlens": torch.tensor([0, *sizes], dtype=torch.int32).cumsum(0, dtype=torch.int32)[None],
        "max_seqlen": torch.tensor([max(sizes)], dtype=torch.int32),
        "has_fill": torch.tensor([num_fill > 0]),
    }
