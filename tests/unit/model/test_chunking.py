import torch

from megatron_lancet.model.chunking import Chunk, merge_hidden, split_hidden, split_mask
from megatron_lancet.schedule.plan import Plan


def test_split_and_merge_are_inverse_also_for_gradients():
    hidden = torch.randn(3, 5, 2, requires_grad=True)
    parts = split_hidden(hidden, Plan(num_chunks=2))
    assert [part.shape for part in parts] == [(3, 3, 2), (3, 2, 2)]
    assert all(part.is_contiguous() for part in parts)
    merged = merge_hidden(parts)
    assert merged.equal(hidden)
    weight = torch.randn_like(merged)
    (merged * weight).sum().backward()
    assert hidden.grad.equal(weight)


def test_one_chunk_is_the_micro_batch_itself():
    hidden = torch.randn(3, 4, 2)
    (part,) = split_hidden(hidden, Plan(num_chunks=1))
    assert part is hidden
    assert merge_hidden([part]) is hidden


def test_masks_follow_their_samples():
    per_sample = torch.arange(5 * 4).view(5, 1, 2, 2)
    parts = split_mask(per_sample, [3, 2])
    assert [part.equal(expected) for part, expected in zip(parts, (per_sample[:3], per_sample[3:]), strict=True)]
    shared = torch.zeros(1, 1, 2, 2)
    assert all(part is shared for part in split_mask(shared, [3, 2]))
    assert split_mask(None, [3, 2]) == [None, None]


def test_the_last_chunk_knows_it():
    assert [Chunk(index, 3).is_last for index in range(3)] == [False, False, True]
