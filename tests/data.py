"""A small learnable token data set, written with Megatron's own builder."""

from pathlib import Path

import numpy as np
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

VOCAB_SIZE = 500
NUM_DOCUMENTS = 300
DOCUMENT_LENGTH = 200


def write_tokens(prefix: Path) -> Path:
    """Documents whose next token is a noisy function of the last one; NullTokenizer's ids, end of text last.

    Args:
        prefix: path without .bin / .idx.
    """
    random = np.random.default_rng(0)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for _ in range(NUM_DOCUMENTS):
        tokens = np.empty(DOCUMENT_LENGTH, dtype=np.int64)
        tokens[0] = random.integers(VOCAB_SIZE - 1)
        for i in range(1, DOCUMENT_LENGTH):
            tokens[i] = (7 * tokens[i - 1] + random.integers(5)) % (VOCAB_SIZE - 1)
        builder.add_item(torch.from_numpy(tokens))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    return prefix
