"""What is read of Megatron's parameters of packed sequences, and what is refused."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from megatron_lancet.errors import UsageError
from megatron_lancet.features.documents.packed import PackedMicroBatch
from tests.parity.documents.samples import params_of

ONE_RANK = SimpleNamespace(context_parallel_size=1, sequence_parallel=False, tensor_model_parallel_size=1)
TWO_RANKS = SimpleNamespace(context_parallel_size=1, sequence_parallel=True, tensor_model_parallel_size=2)
SAMPLES = [[2, 1, 3], [6]]


def read(hidden, config=ONE_RANK, **changes):
    return PackedMicroBatch.of(replace(params_of(SAMPLES), **changes), hidden, config, None)


def test_documents_of_each_sample():
    packed = read(torch.zeros(6, 2, 4))
    assert packed.documents.lengths == ((2, 1, 3), (6,))
    assert packed.positions.T.tolist() == [[0, 1, 0, 0, 1, 2], [0, 1, 2, 3, 4, 5]]
    assert not packed.is_flat
    assert not packed.documents.are_sequences
    assert read(torch.zeros(6, 2, 4), tokens_per_sample=None).documents.are_sequences


def test_attention_sees_positions_of_all_tensor_parallel_ranks():
    packed = read(torch.zeros(3, 2, 4), TWO_RANKS)
    assert packed.positions.shape == (6, 2)
    assert packed.unflattened(hidden := torch.zeros(3, 2, 4)) is hidden


def test_samples_end_to_end_are_put_beside_each_other_and_back():
    hidden = torch.arange(12.0).view(12, 1, 1)
    packed = read(hidden)
    assert packed.is_flat
    beside = packed.unflattened(hidden)
    assert beside[:, :, 0].T.tolist() == [[*range(6)], [*range(6, 12)]]
    assert packed.flattened(beside).equal(hidden)


def test_rotary_embedding_of_each_position():
    packed = read(torch.zeros(6, 2, 4))
    embedding = torch.arange(8.0).view(8, 1, 1, 1)
    rotary = packed.rotary(embedding)
    assert rotary.shape == (6, 2, 1, 1)
    assert rotary[:, :, 0, 0].equal(packed.positions.float())
    assert packed.rotary(None) is None
    with pytest.raises(UsageError, match="a document of 6 tokens, and its max_seqlen_q is 5"):
        packed.documents.rotary_at(embedding[:5], packed.positions)


ENDS = torch.tensor([0, 2, 3, 6, 12], dtype=torch.int32)


def ends(*numbers):
    tensor = torch.tensor(numbers, dtype=torch.int32)
    return {"cu_seqlens_q": tensor, "cu_seqlens_kv": tensor}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qkv_format": "sbhd"}, "qkv_format 'sbhd'"),
        ({"cu_seqlens_q": None}, "no cu_seqlens_q"),
        ({"cu_seqlens_q_padded": ENDS + 1}, "padding between documents"),
        ({"cu_seqlens_kv_padded": ENDS + 1}, "padding between documents"),
        ({"local_cp_size": 1}, "a context-parallel group of their own"),
        ({"cu_seqlens_kv": ENDS + 1}, "other documents for keys"),
        (ends(0, 2, 7, 12), "end at .2, 7, 12., which does not make 2 samples of 6 tokens"),
        (ends(0, 6), "does not make 2 samples"),
        (ends(0, 6, 12, 18), "does not make 2 samples"),
        (ends(1, 6, 12), "does not make 2 samples"),
        (ends(0, 6, 3, 12), "does not make 2 samples"),
    ],
)
def test_other_parameters_are_refused(changes, message):
    with pytest.raises(UsageError, match=message):
        read(torch.zeros(6, 2, 4), **changes)


@pytest.mark.parametrize("padded", [ENDS, ENDS.clone()])
def test_ends_of_documents_with_their_padding(padded):
    """verl and NeMo-RL count padding as a part of the document, and pass one tensor in all fields."""
    four = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), ENDS)
    four |= dict.fromkeys(("cu_seqlens_q_padded", "cu_seqlens_kv_padded"), padded)
    assert read(torch.zeros(6, 2, 4), **four).documents.lengths == ((2, 1, 3), (6,))


def test_repeated_ends_count_once():
    assert read(torch.zeros(6, 2, 4), **ends(0, 2, 3, 6, 6, 12, 12)).documents.lengths == ((2, 1, 3), (6,))


def test_samples_end_to_end_on_several_ranks_are_refused():
    with pytest.raises(UsageError, match="end to end"):
        read(torch.zeros(6, 1, 4), TWO_RANKS)
