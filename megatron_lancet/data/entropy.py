"""The loss of a model that knows only token frequencies: a reference for a validation loss."""

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_lancet.data.indexed import check_dataset
from megatron_lancet.errors import UsageError

_SLICE_TOKENS = 1 << 24
"""Tokens counted at once: ``bincount`` copies them to 8 bytes each, here 128 MiB."""


def unigram_entropy_nats(prefix: str, split_range: tuple[int, int] | None = None) -> float:
    """Entropy of the token distribution of a written dataset, in nats per token.

    It is ``-sum_t p(t) ln p(t)``, the cross-entropy of the best model without context: a validation loss
    below it (Megatron's ``lm loss`` is in nats per token too) shows that the model uses the context.

    Args:
        prefix: path of the dataset without ``.bin``/``.idx``, as for ``--data-path``.
        split_range: documents ``[begin, end)`` to count; None counts all.

    Raises:
        UsageError: there is no dataset at ``prefix``, it is damaged, or no token is in the range.
        ValueError: ``split_range`` is not within the dataset.
    """
    check_dataset(prefix)
    dataset = IndexedDataset(prefix, mmap=True)
    counts = _count_tokens(dataset, split_range)
    num_tokens = int(counts.sum())
    if num_tokens == 0:
        raise UsageError(f"dataset {prefix} has no tokens (documents counted: {split_range or 'all'})")
    probabilities = counts[counts > 0] / num_tokens
    return float(-(probabilities * np.log(probabilities)).sum())


def _count_tokens(dataset: IndexedDataset, split_range: tuple[int, int] | None) -> np.ndarray:
    """How often each id occurs, [largest id + 1] int64."""
    num_documents = len(dataset.document_indices) - 1
    begin, end = (0, num_documents) if split_range is None else split_range
    if not 0 <= begin <= end <= num_documents:
        raise ValueError(f"split_range {split_range} is not within the {num_documents} documents")
    first_sequence, last_sequence = dataset.document_indices[[begin, end]]
    num_tokens = int(dataset.sequence_lengths[first_sequence:last_sequence].sum(dtype=np.int64))
    if num_tokens == 0:
        return np.zeros(0, dtype=np.int64)
    dtype = np.dtype(dataset.index.dtype)
    # The sequences lie one after the other in the .bin file, in the order of the index.
    offset = int(dataset.index.sequence_pointers[first_sequence])
    tokens = dataset.bin_reader.read(dtype=dtype, count=num_tokens, offset=offset)
    counts = np.zeros(int(tokens.max()) + 1, dtype=np.int64)
    for start in range(0, num_tokens, _SLICE_TOKENS):
        counts += np.bincount(tokens[start : start + _SLICE_TOKENS], minlength=len(counts))
    return counts
