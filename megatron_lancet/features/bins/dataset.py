"""A data set whose samples are single documents, of very different lengths."""

from pathlib import Path
from typing import Any, TypedDict

import numpy as np
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.megatron_dataset import MegatronDataset
from megatron.core.datasets.utils import Split

from megatron_lancet.data.indexed import check_dataset
from megatron_lancet.errors import UsageError

_TOKENS_SUFFIX, _MASK_SUFFIX = "_document", "_loss_mask"
_SHORTEST = 2
"""Tokens of the shortest sample: one to read, one to predict."""


class Sample(TypedDict):
    """A document in a form of one size for all, so that Megatron's data loader can stack samples.

    tokens: [seq_length + 1] int32, the document and then zeros.
    is_label: [seq_length + 1] uint8, 1 where a token counts as a label.
    num_tokens: tokens of the document.
    """

    tokens: np.ndarray
    is_label: np.ndarray
    num_tokens: int


def mask_prefix(prefix: str) -> str:
    """Path, without .bin/.idx, of the loss mask that belongs to a dataset."""
    return prefix.removesuffix(_TOKENS_SUFFIX) + _MASK_SUFFIX


class DocumentDataset(MegatronDataset):
    """Documents of an indexed data set in random order, each one sample, in as many epochs as are asked for.

    A document longer than ``sequence_length + 1`` tokens is cut to its first tokens; one of a single token is left out.
    The order is a function of the seed and the epoch, so that nothing needs to be stored for a run that goes on.

    Next to PREFIX_KEY_document there may be a data set PREFIX_KEY_loss_mask of the same lengths, which says which
    tokens count as labels.

    Raises:
        UsageError: there is no document for samples that are asked for, or the loss mask is damaged, or of other
            documents.
    """

    def __init__(
        self,
        dataset: IndexedDataset,
        dataset_path: str | None,
        indices: np.ndarray,
        num_samples: int | None,
        index_split: Split,
        config: GPTDatasetConfig,
    ) -> None:
        super().__init__(dataset, dataset_path, indices, num_samples, index_split, config)
        self._documents = indices[dataset.sequence_lengths[indices] >= _SHORTEST]
        if num_samples and not len(self._documents):
            raise UsageError(
                f"the {index_split.name} split of {dataset_path} has no document of {_SHORTEST} tokens or more, and "
                f"{num_samples} samples are needed. Change --split, or add documents."
            )
        self._mask = _mask_of(dataset, dataset_path, config)
        self._order: tuple[int, np.ndarray] = (-1, indices[:0])

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: IndexedDataset) -> int:
        """Number of documents, which are divided into the splits."""
        return len(low_level_dataset.sequence_lengths)

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: GPTDatasetConfig) -> IndexedDataset:
        """Open the tokens."""
        return GPTDataset.build_low_level_dataset(dataset_path, config)

    def __len__(self) -> int:
        return max(self.num_samples or 0, len(self._documents))

    def __getitem__(self, idx: int) -> Any:
        """Returns a :class:`Sample`."""
        epoch, place = divmod(int(idx), len(self._documents))
        document = int(self._documents[self._order_of(epoch)[place]])
        longest = self.config.sequence_length + 1
        num_tokens = min(int(self.dataset.sequence_lengths[document]), longest)
        tokens, is_label = np.zeros(longest, np.int32), np.zeros(longest, np.uint8)
        tokens[:num_tokens] = self.dataset.get(document, length=num_tokens)
        is_label[:num_tokens] = 1 if self._mask is None else self._mask.get(document, length=num_tokens)
        if self.config.eod_mask_loss:  # as Megatron's: what follows the end of a document is not predicted
            is_label[1:][tokens[:-1] == self.config.tokenizer.eod] = 0
        return Sample(tokens=tokens, is_label=is_label, num_tokens=num_tokens)

    def _order_of(self, epoch: int) -> np.ndarray:
        if self._order[0] != epoch:
            drawn = np.random.default_rng([self.config.random_seed, epoch])
            self._order = epoch, drawn.permutation(len(self._documents))
        return self._order[1]


def _mask_of(dataset: IndexedDataset, path: str | None, config: GPTDatasetConfig) -> IndexedDataset | None:
    """The loss mask next to the tokens, if there is one.

    Raises:
        UsageError: one of its files is missing or damaged, or its documents have other lengths.
    """
    if path is None or not any(Path(f"{mask_prefix(path)}{suffix}").is_file() for suffix in (".bin", ".idx")):
        return None
    check_dataset(mask_prefix(path))
    mask = IndexedDataset(mask_prefix(path), mmap=config.mmap_bin_files)
    if not np.array_equal(mask.sequence_lengths, dataset.sequence_lengths):
        raise UsageError(
            f"the loss mask {mask_prefix(path)} should have documents of the lengths of {path}, and they differ. Write "
            "both again with lancet data encode, or remove the mask."
        )
    return mask
