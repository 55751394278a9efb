"""Micro-batches of documents on one rank: where documents begin, and what is refused."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from megatron.core.utils import flatten_batch_for_packed_sequences

from megatron_lancet.errors import UsageError
from megatron_lancet.features.documents.batch import DTYPES, DocumentBatch
from megatron_lancet.features.documents.packed import PackedMicroBatch
from megatron_lancet.features.documents.sharing import check_shares

ONE_RANK = SimpleNamespace(context_parallel_size=1, sequence_parallel=False)


def sample_of(rows: list[list[int]]) -> dict[str, torch.Tensor]:
    """A batch of a data iterator; each row has a sample's bounds."""
    shape, width = (len(rows), rows[0][-1]), max(map(len, rows)) + 2
    numbers = torch.arange(shape[0] * shape[1]).reshape(shape)
    return {
        "tokens": numbers,
        "labels": numbers + 1,
        "position_ids": numbers % 7,
        "loss_mask": (numbers % 3 > 0).float(),
        "cu_seqlens": torch.tensor([row + row[-1:] * (width - len(row)) for row in rows], dtype=torch.int32),
        "max_seqlen": torch.tensor([max(np.diff(row)) for row in rows], dtype=torch.int32),
    }


def random_rows(random: np.random.Generator) -> list[list[int]]:
    length = int(random.integers(1, 40))
    num_cuts = random.integers(0, length, size=random.integers(1, 4))
    return [[0, *sorted(random.choice(range(1, length), num, replace=False)), length] for num in num_cuts]


def test_samples_end_to_end_are_those_of_megatrons_own_script():
    random = np.random.default_rng(0)
    for _ in range(50):
        sample = sample_of(random_rows(random))
        batch = DocumentBatch.read(sample, tuple(DTYPES))
        assert (batch.num_samples, batch.num_positions) == sample["tokens"].shape
        assert all(batch.tensors[name].equal(sample[name]) for name in DTYPES)
        expected = flatten_batch_for_packed_sequences(dict(sample))
        assert batch.bounds.equal(expected["cu_seqlens"][0])
        assert batch.bounds.dtype == torch.int32
        assert batch.longest == int(expected["max_seqlen"])
        assert all(batch.end_to_end.tensors[name].equal(expected[name]) for name in DTYPES)


def test_only_what_a_stage_reads_is_kept():
    sample = {**sample_of([[0, 3, 4]]), "labels": None}
    assert set(DocumentBatch.read(sample, ("tokens", "position_ids")).tensors) == {"tokens", "position_ids"}
    assert DocumentBatch.read(sample, ()).tensors == {}


def test_sequences_of_balancing_losses_are_samples_or_documents():
    batch = DocumentBatch.read(sample_of([[0, 3, 10], [0, 10]]), tuple(DTYPES))
    packed = batch.packed_seq_params(on_host=True, by_document=False)
    assert packed.qkv_format == "thd"
    assert packed.cu_seqlens_q.tolist() == packed.cu_seqlens_kv.tolist() == [0, 3, 10, 20]
    assert packed.max_seqlen_q == packed.max_seqlen_kv == 10
    assert packed.tokens_per_sample == 10
    assert batch.packed_seq_params(on_host=True, by_document=True).tokens_per_sample is None


@pytest.mark.parametrize("has_fill", [False, True])
def test_balancing_loss_knows_the_document_that_fills_a_sample(has_fill):
    sample = {**sample_of([[0, 3, 4]]), **({"has_fill": torch.tensor([True])} if has_fill else {})}
    params = DocumentBatch.read(sample, ()).packed_seq_params(on_host=True, by_document=True)
    found = PackedMicroBatch.of(params, torch.zeros(4, 1, 2), ONE_RANK, None).documents
    assert found.has_fill == found.of_samples(0, 1).has_fill == has_fill


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        (None, "a batch has no cu_seqlens, the bounds of its documents, which --dataloader-inter-document-masking"),
        ([[1, 4]], "cu_seqlens of each sample should rise from 0 to its 4 positions, and a batch has [[1, 4]]"),
        ([[0, 3]], "and a batch has [[0, 3]]"),
        ([[0, 3, 2, 4]], "and a batch has [[0, 3, 2, 4]]"),
    ],
)
def test_wrong_bounds_are_refused(bounds, message):
    sample = sample_of([[0, 4]])
    sample["cu_seqlens"] = None if bounds is None else torch.tensor(bounds, dtype=torch.int32)
    with pytest.raises(UsageError, match=re.escape(message)):
        DocumentBatch.read(sample, ())


@pytest.mark.parametrize(
    ("num_positions", "context", "sequence", "refusal"),
    [
        (7, 1, 1, None),
        (8, 2, 1, None),
        (6, 2, 1, "6 positions, which 2 x --context-parallel-size 2 can't share out: it takes a multiple of 4"),
        (9, 1, 2, "9 positions, which --tensor-model-parallel-size 2 of --sequence-parallel can't share out"),
        (8, 2, 4, None),
        (12, 2, 4, "2 x --context-parallel-size 2 and --tensor-model-parallel-size 4 of --sequence-parallel .* of 8"),
    ],
)
def test_positions_that_ranks_cannot_share_out_are_refused(num_positions, context, sequence, refusal):
    if refusal is None:
        check_shares(num_positions, context, sequence)
        return
    with pytest.raises(UsageError, match=refusal):
        check_shares(num_positions, context, sequence)
