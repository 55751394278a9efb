import pytest
import torch

from megatron_lancet.features.documents.lengths import Documents
from megatron_lancet.features.documents.packed import PackedMicroBatch
from megatron_lancet.model.chunking import (
    Chunk,
    make_chunks,
    merge_hidden,
    split_hidden,
    split_rows,
    unchunked_micro_batch,
)
from megatron_lancet.schedule.plan import ChunkDim, Segment

WHOLE, BATCH = Segment(1, None, 1), Segment(1, None, 2)
SEQUENCE = Segment(1, None, 2, ChunkDim.SEQUENCE)


@pytest.mark.parametrize(
    ("segment", "shapes"),
    [(BATCH, [(3, 3, 2), (3, 2, 2)]), (SEQUENCE, [(2, 5, 2), (1, 5, 2)])],
    ids=["batch", "sequence"],
)
def test_split_and_merge_are_inverse_for_values_and_gradients(segment, shapes):
    hidden = torch.randn(3, 5, 2, requires_grad=True)
    parts = split_hidden(hidden, segment)
    assert [part.shape for part in parts] == shapes
    assert all(part.is_contiguous() for part in parts)
    rows = split_rows(hidden.detach().view(15, 2), hidden.shape, segment)
    assert all(row.equal(part.flatten(0, 1)) for row, part in zip(rows, parts, strict=True))
    merged = merge_hidden(parts, segment)
    assert merged.equal(hidden)
    weight = torch.randn_like(merged)
    (merged * weight).sum().backward()
    assert hidden.grad.equal(weight)


def test_split_keeps_the_multiple_of_the_segment():
    positions = Segment(1, None, 3, ChunkDim.SEQUENCE, chunk_multiple=16)
    assert [part.size(0) for part in split_hidden(torch.zeros(64, 2, 1), positions)] == [32, 16, 16]


def test_split_into_one_chunk_returns_the_micro_batch_itself():
    hidden = torch.randn(3, 4, 2)
    (part,) = split_hidden(hidden, WHOLE)
    assert part is hidden
    assert merge_hidden([part], WHOLE) is hidden


def test_attention_masks_are_split_with_their_samples():
    parts = split_hidden(torch.zeros(2, 5, 1), BATCH)
    per_sample = torch.arange(5 * 4).view(5, 1, 2, 2)
    masks = [chunk.attention_mask for chunk in make_chunks(parts, BATCH, Chunk(0, 1, attention_mask=per_sample))]
    assert [mask.equal(expected) for mask, expected in zip(masks, (per_sample[:3], per_sample[3:]), strict=True)]
    shared = torch.zeros(1, 1, 2, 2)
    assert all(
        chunk.attention_mask is shared for chunk in make_chunks(parts, BATCH, Chunk(0, 1, attention_mask=shared))
    )


def test_attention_bias_is_split_with_its_samples():
    parts = split_hidden(torch.zeros(2, 5, 1), BATCH)
    per_sample, shared = torch.randn(5, 3, 2, 2), torch.randn(1, 3, 2, 2)
    first, second = make_chunks(parts, BATCH, unchunked_micro_batch(attention_bias=per_sample))
    assert torch.equal(first.attention_bias, per_sample[:3])
    assert torch.equal(second.attention_bias, per_sample[3:])
    chunks = make_chunks(parts, BATCH, unchunked_micro_batch(attention_bias=shared))
    assert all(chunk.attention_bias is shared for chunk in chunks)


def test_attention_gets_the_bias_that_it_may_refuse():
    documents = Documents(((2, 1), (3,)))
    packed = PackedMicroBatch(documents, documents.positions())
    bias = torch.randn(1, 3, 3, 3)
    assert unchunked_micro_batch(attention_bias=bias, packed=packed).attention_bias is bias
    parts = split_hidden(torch.zeros(3, 5, 1), SEQUENCE)
    chunks = make_chunks(parts, SEQUENCE, unchunked_micro_batch(attention_bias=bias))
    assert all(chunk.attention_bias is bias for chunk in chunks)


def test_sequence_chunks_have_their_positions():
    parts = split_hidden(torch.zeros(3, 5, 1), SEQUENCE)
    rotary = torch.arange(3).view(3, 1, 1, 1)
    first, second = make_chunks(parts, SEQUENCE, Chunk(0, 1, rotary_pos_emb=rotary))
    assert (first.start, second.start) == (0, 2)
    assert first.earlier is second.earlier is not None
    assert [chunk.rotary_pos_emb.ravel().tolist() for chunk in (first, second)] == [[0, 1], [2]]


def test_last_chunk_is_marked():
    assert [Chunk(index, 3).is_last for index in range(3)] == [False, False, True]


def test_padding_is_split_along_either_dimension():
    padding = torch.arange(15).view(3, 5)
    whole = Chunk(0, 1, padding_mask=padding)
    for segment, parts in ((BATCH, (padding[:, :3], padding[:, 3:])), (SEQUENCE, (padding[:2], padding[2:]))):
        chunks = make_chunks(split_hidden(torch.zeros(3, 5, 1), segment), segment, whole)
        assert [chunk.padding_mask.equal(part) for chunk, part in zip(chunks, parts, strict=True)] == [True, True]


def test_tuples_of_rotary_embeddings_are_split_one_by_one():
    per_position, per_sample = torch.arange(3).view(3, 1, 1, 1), torch.arange(15).view(3, 5, 1, 1)
    whole = Chunk(0, 1, rotary_pos_emb=(per_position, (per_sample, None)))
    in_samples, (last_sample, _) = make_chunks(split_hidden(torch.zeros(3, 5, 1), BATCH), BATCH, whole)[
        1
    ].rotary_pos_emb
    assert in_samples is per_position
    assert last_sample.equal(per_sample[:, 3:])
    chunk = make_chunks(split_hidden(torch.zeros(3, 5, 1), SEQUENCE), SEQUENCE, whole)[1]
    last_position, nested = chunk.rotary_pos_emb
    assert last_position.equal(per_position[2:])
    assert nested[0].equal(per_sample[2:])
    assert nested[1] is None


def test_tuples_of_rotary_embeddings_follow_documents():
    documents = Documents(((2, 1), (3,)))
    packed = PackedMicroBatch(documents, documents.positions())
    first, second = torch.arange(3.0).view(3, 1, 1, 1), 10 * torch.arange(3.0).view(3, 1, 1, 1)
    rotary = unchunked_micro_batch(None, (first, second), None, packed).rotary_pos_emb
    assert isinstance(rotary, tuple)
    queries, keys = rotary
    assert isinstance(queries, torch.Tensor)
    assert queries[..., 0, 0].tolist() == [[0, 0], [1, 1], [0, 2]]
    assert keys.equal(10 * queries)
