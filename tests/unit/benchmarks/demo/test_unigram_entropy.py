"""Entropy of datasets small enough to compute by hand."""

import math
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from benchmarks.demo.training_log import entropy
from benchmarks.demo.training_log.entropy import unigram_entropy_nats
from megatron_lancet.errors import UsageError


def write_dataset(prefix: Path, documents: list[list[int]], dtype: type = np.uint16) -> str:
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for document in documents:
        builder.add_document(np.array(document), [len(document)])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_unigram_entropy_equals_the_value_by_hand(tmp_path: Path, dtype: type) -> None:
    prefix = write_dataset(tmp_path / "data", [[7, 7, 0], [65499], [7, 0, 7, 5]], dtype)
    # p = 1/2 for 7, 1/4 for 0, 1/8 for 65499 and 5: 1/2 ln 2 + 1/4 ln 4 + 2/8 ln 8 = 1.75 ln 2
    assert unigram_entropy_nats(prefix) == pytest.approx(1.75 * math.log(2), rel=1e-12)


def test_unigram_entropy_counts_large_datasets_in_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = np.random.default_rng(0).integers(0, 50, 1001).tolist()
    prefix = write_dataset(tmp_path / "data", [tokens])
    expected = unigram_entropy_nats(prefix)
    monkeypatch.setattr(entropy, "_SLICE_TOKENS", 100)
    assert unigram_entropy_nats(prefix) == expected


def test_unigram_entropy_refuses_a_missing_dataset(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no dataset at .*none"):
        unigram_entropy_nats(str(tmp_path / "none"))
