"""Keys that grow by chunks: the same values and gradients as if joined for each chunk, in memory of their own once."""

import gc
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron_lancet.model.attention.prefix import Prefix

SIZES = [3, 2, 2]


def chunks() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, 2, 4, 5, generator=generator, requires_grad=True) for size in SIZES]


def weigh(prefix: torch.Tensor) -> torch.Tensor:
    """Something that keeps its input for the backward pass, as attention does."""
    return (prefix * prefix).sum() * len(prefix)


def test_prefix_equals_concatenated_tensors():
    joined, grown = chunks(), chunks()
    sum(weigh(torch.cat(joined[: i + 1])) for i in range(3)).backward()
    prefix = Prefix(sum(SIZES))
    parts = [prefix.up_to(own, i, keep=i < 2) for i, own in enumerate(grown)]
    for i, part in enumerate(parts):
        assert part.equal(torch.cat(grown[: i + 1]))
    sum(weigh(part) for part in parts).backward()
    for a, b in zip(joined, grown, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_prefix_chunks_share_memory():
    prefix = Prefix(sum(SIZES))
    parts = [prefix.up_to(own, i, keep=True) for i, own in enumerate(chunks())]
    assert len({part.untyped_storage().data_ptr() for part in parts}) == 1


@pytest.mark.parametrize("num_backwards", [1, 2])
def test_prefix_accepts_a_recomputed_chunk(num_backwards):
    joined, grown = chunks(), chunks()
    prefix = Prefix(sum(SIZES))

    def segment(own: torch.Tensor, index: int) -> torch.Tensor:
        return weigh(prefix.up_to(2 * own, index, keep=True))

    for _ in range(num_backwards):
        sum(weigh(torch.cat([2 * own for own in joined[: i + 1]])) for i in range(3)).backward()
        outputs = [checkpoint(segment, own, i, use_reentrant=False) for i, own in enumerate(grown)]
        sum(outputs).backward()
    for a, b in zip(joined, grown, strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    assert prefix._room is None
    assert not prefix._seen


def test_recomputed_prefix_is_freed_without_a_backward_pass():
    """What runs again holds the prefix, and the graph holds what runs again: the prefix must not hold the graph."""
    prefix = Prefix(sum(SIZES))

    def segment(own: torch.Tensor, index: int, prefix: Prefix) -> torch.Tensor:
        return weigh(prefix.up_to(own.sin(), index, keep=True))

    outputs = [checkpoint(segment, own, i, prefix, use_reentrant=False) for i, own in enumerate(chunks())]
    gone = weakref.ref(prefix)
    del outputs, prefix
    gc.collect()
    assert gone() is None
