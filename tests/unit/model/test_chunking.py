import pytest
import torch

from megatron_lancet.model.chunking import Chunk, make_chunks, merge_hidden, split_hidden, split_rows
from megatron_lancet.schedule.plan import ChunkDim, Plan

SEQUENCE = Plan(num_chunks=2, chunk_dim=ChunkDim.SEQUENCE)


@pytest.mark.parametrize(
    ("plan", "shapes"),
    [(Plan(num_chunks=2), [(3, 3, 2), (3, 2, 2)]), (SEQUENCE, [(2, 5, 2), (1, 5, 2)])],
    ids=["batch", "sequence"],
)
def test_split_and_merge_are_inverse_also_for_gradients(plan, shapes):
    hidden = torch.randn(3, 5, 2, requires_grad=True)
    parts = split_hidden(hidden, plan)
    assert [part.shape for part in parts] == shapes
    assert all(part.is_contiguous() for part in parts)
    rows = split_rows(hidden.detach().view(15, 2), hidden.shape, plan)
    assert all(row.equal(part.flatten(0, 1)) for row, part in zip(rows, parts, strict=True))
    merged = merge_hidden(parts, plan)
    assert merged.equal(hidden)
    weight = torch.randn_like(merged)
    (merged * weight).sum().backward()
    assert hidden.grad.equal(weight)


def test_one_chunk_is_the_micro_batch_itself():
    hidden = torch.randn(3, 4, 2)
    (part,) = split_hidden(hidden, Plan(num_chunks=1))
    assert part is hidden
    assert merge_hidden([part], Plan(num_chunks=1)) is hidden


def test_masks_follow_their_samples():
    parts = split_hidden(torch.zeros(2, 5, 1), Plan(num_chunks=2))
    per_sample = torch.arange(5 * 4).view(5, 1, 2, 2)
    masks = [chunk.attention_mask for chunk in make_chunks(parts, Plan(num_chunks=2), per_sample)]
    assert [mask.equal(expected) for mask, expected in zip(masks, (per_sample[:3], per_sample[3:]), strict=True)]
    shared = torch.zeros(1, 1, 2, 2)
    assert all(chunk.attention_mask is shared for chunk in make_chunks(parts, Plan(num_chunks=2), shared))


def test_sequence_chunks_know_their_positions():
    parts = split_hidden(torch.zeros(3, 5, 1), SEQUENCE)
    rotary = torch.arange(3).view(3, 1, 1, 1)
    first, second = make_chunks(parts, SEQUENCE, None, rotary)
    assert (first.start, second.start) == (0, 2)
    assert first.earlier is second.earlier is not None
    assert [chunk.rotary_pos_emb.ravel().tolist() for chunk in (first, second)] == [[0, 1], [2]]


def test_the_last_chunk_knows_it():
    assert [Chunk(index, 3).is_last for index in range(3)] == [False, False, True]
