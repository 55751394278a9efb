"""A small learnable token data set, written with Megatron's own builder."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

VOCAB_SIZE = 500
NUM_DOCUMENTS = 300
DOCUMENT_LENGTH = 200
END_OF_TEXT = VOCAB_SIZE - 1
"""Last token of a short document."""
SHORT_LENGTHS = (1, 40)
"""Of short documents, shortest and longest."""


def write_tokens(prefix: Path) -> Path:
    """Documents whose next token is a noisy function of the last one; NullTokenizer's ids, end of text last.

    Args:
        prefix: path without .bin / .idx.
    """
    random = np.random.default_rng(0)
    return _write(prefix, (_tokens(random, DOCUMENT_LENGTH) for _ in range(NUM_DOCUMENTS)))


def write_short_documents(prefix: Path, num_documents: int = 1000) -> Path:
    """Documents of very different lengths, each of which ends with :data:`END_OF_TEXT`.

    Args:
        prefix: path without .bin / .idx.
    """
    random = np.random.default_rng(0)
    lengths = random.integers(*SHORT_LENGTHS, size=num_documents, endpoint=True)
    return _write(prefix, (np.append(_tokens(random, length - 1), END_OF_TEXT) for length in lengths))


def _tokens(random: np.random.Generator, length: int) -> np.ndarray:
    tokens = np.empty(length, dtype=np.int64)
    for i in range(length):
        following = 7 * tokens[i - 1] + random.integers(5) if i else random.integers(VOCAB_SIZE - 1)
        tokens[i] = following % (VOCAB_SIZE - 1)
    return tokens


def _write(prefix: Path, documents: Iterable[np.ndarray]) -> Path:
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for tokens in documents:
        builder.add_item(torch.from_numpy(tokens))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    return prefix
