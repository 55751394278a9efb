"""The standard library as documents: data sets made by the project's tools, and micro-batches of their documents."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.packed_seq_params import PackedSeqParams

from benchmarks.harness.cases import Shape


@dataclass(frozen=True)
class MicroBatch:
    """What the model gets: tokens, positions, labels and loss mask, each [B, S], and of packed documents their ends."""

    tokens: torch.Tensor
    positions: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    packed: PackedSeqParams | None


class Documents:
    """A data set and the documents of its steps, the same on all ranks.

    Attributes:
        steps: lengths of the documents of each step, per rank.
        num_documents: of a step on a rank.
    """

    def __init__(self, folder: Path, kind: str, shape: Shape, num_steps: int, num_ranks: int, filled: float) -> None:
        """
        Args:
            folder: with the data sets that :func:`benchmarks.bins.data.prepare` wrote.
            filled: part of the positions of a step's bins that its documents fill in the mean.
        """
        prefix = folder / f"{kind}_text_document"
        self._dataset = IndexedDataset(str(prefix))
        self._most = shape.seq_length
        usable = [index for index, length in enumerate(self._dataset.sequence_lengths.tolist()) if length > 1]
        self.num_documents = round(filled * shape.micro_batches * shape.seq_length / fmean(map(self._length, usable)))
        dice = random.Random(1)  # noqa: S311 - draws documents, keeps no secret
        self._numbers = [
            [dice.choices(usable, k=self.num_documents) for _ in range(num_ranks)] for _ in range(num_steps)
        ]
        self.steps = [[[self._length(number) for number in rank] for rank in step] for step in self._numbers]

    def _length(self, number: int) -> int:
        return min(int(self._dataset.sequence_lengths[number]) - 1, self._most)

    def text_of(self, step: int, samples: Sequence[int]) -> list[np.ndarray]:
        """Tokens of samples of a step, each [length + 1]; sample ``i`` is the i-th of all ranks'."""
        numbers = [number for rank in self._numbers[step] for number in rank]
        return [self._dataset[numbers[sample]][: self._most + 1].astype(np.int64) for sample in samples]

    def filled(self, rank: int) -> MicroBatch:
        """A packed micro-batch of exactly a full bin's tokens; its last document is cut."""
        texts: list[np.ndarray] = []
        room = self._most
        for numbers in (step[rank] for step in self._numbers):
            for number in numbers:
                if room == 0:
                    return packed(texts)
                texts.append(self._dataset[number][: room + 1].astype(np.int64))
                room -= len(texts[-1]) - 1
        raise ValueError(f"the documents of all steps have fewer than {self._most} tokens")


def packed(texts: Sequence[np.ndarray]) -> MicroBatch:
    """Documents one after the other in one sample [1, S].

    Args:
        texts: tokens of each document, [length + 1].
    """
    lengths = [len(text) - 1 for text in texts]
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )
    tokens, labels = (np.concatenate(parts)[None] for parts in zip(*((t[:-1], t[1:]) for t in texts), strict=True))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return MicroBatch(torch.from_numpy(tokens), positions, torch.from_numpy(labels), torch.ones(tokens.shape), params)


def padded_to(texts: Sequence[np.ndarray], length: int) -> MicroBatch:
    """Documents of one row each, [B, length], whose padding is no label."""
    tokens, labels = (np.zeros((len(texts), length), dtype=np.int64) for _ in range(2))
    mask = torch.zeros(len(texts), length)
    for row, text in enumerate(texts):
        tokens[row, : len(text) - 1], labels[row, : len(text) - 1] = text[:-1], text[1:]
        mask[row, : len(text) - 1] = 1.0
    positions = torch.arange(length).expand(len(texts), -1)
    return MicroBatch(torch.from_numpy(tokens), positions, torch.from_numpy(labels), mask, None)
