"""The loss of a model that knows only token frequencies: a reference for a validation loss."""

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_lancet.data.indexed import check_dataset

_SLICE_TOKENS = 1 << 24
"""Tokens counted at once: ``bincount`` copies them to 8 bytes each, here 128 MiB."""


def unigram_entropy_nats(prefix: str) -> float:
    """Entropy of the token distribution of a written dataset, in nats per token.

    It is ``-sum_t p(t) ln p(t)``, the cross-entropy of the best model without context: a validation loss
    below it (Megatron's ``lm loss`` is in nats per token too) shows that the model uses the context.

    Args:
        prefix: path of the dataset without ``.bin``/``.idx``, as for ``--data-path``.

    Raises:
        UsageError: there is no dataset at ``prefix``, or it is damaged.
    """
    check_dataset(prefix)
    dataset = IndexedDataset(prefix, mmap=True)
    num_tokens = int(dataset.sequence_lengths.sum(dtype=np.int64))
    counts = _count_tokens(dataset, num_tokens)
    probabilities = counts[counts > 0] / num_tokens
    return float(-(probabilities * np.log(probabilities)).sum())


def _count_tokens(dataset: IndexedDataset, num_tokens: int) -> np.ndarray:
    """How often each id occurs, [largest id + 1] int64."""
    # The sequences lie one after the other in the .bin file.
    tokens = dataset.bin_reader.read(dtype=np.dtype(dataset.index.dtype), count=num_tokens, offset=0)
    counts = np.zeros(int(tokens.max()) + 1, dtype=np.int64)
    for start in range(0, num_tokens, _SLICE_TOKENS):
        counts += np.bincount(tokens[start : start + _SLICE_TOKENS], minlength=len(counts))
    return counts
