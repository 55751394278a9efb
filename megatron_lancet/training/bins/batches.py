"""Batches of a model, made of the samples of a bin.

Legend of shapes: B samples that lie beside each other, S positions of each of them, n bounds of documents.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

type Batch = dict[str, torch.Tensor]
"""tokens, labels, position_ids [B, S] int64, loss_mask [B, S] float32, cu_seqlens [B, n] and max_seqlen [B] int32."""


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
    bounds = torch.tensor([0, *sizes], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return {
        **_stacked([documents], int(bounds[-1])),
        "position_ids": torch.cat([*map(torch.arange, in_use), torch.zeros(num_fill, dtype=torch.int64)])[None],
        "cu_seqlens": bounds[None],
        "max_seqlen": torch.tensor([max(sizes)], dtype=torch.int32),
    }


def padded(documents: Sequence[Document], multiple: int, at_least: int) -> Batch:
    """Documents beside each other, each filled up to the longest of them. Arguments as for :func:`packed`."""
    longest = max(document.num_positions for document in documents)
    num_positions = max(-(-longest // multiple) * multiple, at_least)
    rows = len(documents)
    return {
        **_stacked([[document] for document in documents], num_positions),
        "position_ids": torch.arange(num_positions).clamp(max=longest - 1).repeat(rows, 1),
        "cu_seqlens": torch.tensor([[0, num_positions]], dtype=torch.int32).repeat(rows, 1),
        "max_seqlen": torch.full((rows,), num_positions, dtype=torch.int32),
    }


def _stacked(rows: Sequence[Sequence[Document]], num_positions: int) -> Batch:
    shape = len(rows), num_positions
    tokens, labels = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    loss_mask = torch.zeros(shape)
    for row, documents in enumerate(rows):
        end = 0
        for document in documents:
            begin, end = end, end + document.num_positions
            tokens[row, begin:end] = document.tokens[:-1]
            labels[row, begin:end] = document.tokens[1:]
            loss_mask[row, begin:end] = document.is_label[1:]
    return {"tokens": tokens, "labels": labels, "loss_mask": loss_mask}
