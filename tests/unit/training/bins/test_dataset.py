"""Documents as samples: their order, their loss mask, and what is refused."""

from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.datasets.utils import Split

from megatron_lancet.errors import UsageError
from megatron_lancet.features.bins.dataset import DocumentDataset, mask_prefix

END = 99


class Tokenizer:
    eod = END
    vocab_size = 100
    unique_identifiers = "none"


def write(prefix, rows, dtype):
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for row in rows:
        builder.add_item(torch.tensor(row))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")


@pytest.fixture
def prefix(tmp_path):
    """Documents of 5, 1, 2 and 9 tokens; the second is too short to predict anything."""
    path = tmp_path / "corpus_text_document"
    write(path, [[1, 2, END, 4, 5], [6], [7, 8], list(range(10, 19))], np.uint16)
    return path


def built(prefix, num_samples=None, documents=(0, 1, 2, 3), **settings):
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=6,
        split="1,0,0",
        blend=([str(prefix)], None),
        tokenizer=Tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=settings.get("eod_mask_loss", False),
    )
    low = DocumentDataset.build_low_level_dataset(str(prefix), config)
    return DocumentDataset(low, str(prefix), np.array(documents), num_samples, Split.train, config)


def documents(dataset, indices):
    samples = [dataset[index] for index in indices]
    return [sample["tokens"][: sample["num_tokens"]].tolist() for sample in samples]


def test_epochs_have_each_document_once_in_different_orders(prefix):
    dataset = built(prefix, num_samples=30)
    assert len(dataset) == 30
    epochs = [documents(dataset, range(first, first + 3)) for first in range(0, 30, 3)]
    whole = [[1, 2, END, 4, 5], [7, 8], list(range(10, 17))]  # the longest is cut to seven tokens
    assert all(sorted(epoch) == whole for epoch in epochs)
    assert len({str(epoch) for epoch in epochs}) > 1
    assert documents(built(prefix, num_samples=30), range(29, -1, -1)) == [*reversed([*chain(*epochs)])]


def test_samples_have_one_size_and_all_tokens_count(prefix):
    for sample in map(built(prefix).__getitem__, range(3)):
        num_tokens = sample["num_tokens"]
        assert sample["tokens"].shape == sample["is_label"].shape == (7,)
        assert sample["is_label"].tolist() == [1] * num_tokens + [0] * (7 - num_tokens)


def test_loss_mask_beside_the_tokens_says_which_count(prefix):
    rows = [[0, 0, 0, 1, 1], [1], [0, 1], [0] * 5 + [1] * 4]
    write(mask_prefix(str(prefix)), rows, np.uint8)
    assert mask_prefix(str(prefix)).endswith("corpus_text_loss_mask")
    found = {
        tuple(sample["tokens"][:2]): sample["is_label"].tolist() for sample in map(built(prefix).__getitem__, range(3))
    }
    assert found == {(1, 2): [0, 0, 0, 1, 1, 0, 0], (7, 8): [0, 1, 0, 0, 0, 0, 0], (10, 11): [0, 0, 0, 0, 0, 1, 1]}


def test_eod_mask_loss_leaves_out_tokens_after_a_document(prefix):
    dataset = built(prefix, documents=(0,), eod_mask_loss=True)
    assert dataset[0]["is_label"].tolist() == [1, 1, 1, 0, 1, 0, 0]


def test_loss_mask_of_other_documents_is_refused(prefix):
    write(mask_prefix(str(prefix)), [[1], [1]], np.uint8)
    with pytest.raises(UsageError, match="should have documents of the lengths of"):
        built(prefix)


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_half_a_loss_mask_is_refused(prefix, suffix):
    write(mask_prefix(str(prefix)), [[1]], np.uint8)
    Path(f"{mask_prefix(str(prefix))}{suffix}").unlink()
    with pytest.raises(UsageError, match=f"loss_mask{suffix} is missing"):
        built(prefix)


def test_wanted_samples_of_an_empty_split_are_refused(prefix):
    with pytest.raises(UsageError, match=r"train split of .* has no document of 2 tokens"):
        built(prefix, num_samples=3, documents=(1,))
    assert len(built(prefix, num_samples=0, documents=(1,))) == 0
