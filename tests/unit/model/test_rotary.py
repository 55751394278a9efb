"""Rotary embeddings of multi-latent attention match the chunk's positions, with both of its methods."""

from types import SimpleNamespace

import pytest
import torch

from megatron_lancet.training.platform.cpu import cpu_platform

LONGEST = 24
"""Number of positions; the embedding is built for fewer, so the fused kernel's tables are rebuilt."""
CHANNELS = 8


@pytest.fixture(scope="module")
def platform():
    with cpu_platform():
        yield


def yarn():
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

    return YarnRotaryEmbedding(
        CHANNELS, scaling_factor=4.0, original_max_position_embeddings=4, use_cpu_initialization=True
    )


def positioned(rotary):
    """Returns the embedding as in a plan with sequence chunks."""
    from megatron_lancet.model.attention import switchable

    names = {"YarnRotaryEmbedding": "_PositionedYarnRotary", "RotaryEmbedding": "_PositionedRotary"}
    rotary.__class__ = getattr(switchable, names[type(rotary).__name__])
    return rotary


def chunks(*sizes: int):
    """Returns consecutive sequence chunks with their sizes."""
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [(SimpleNamespace(start=start, documents=None), size) for start, size in zip(starts, sizes, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(8, 8, 8), (3, 14, 7), (14, 7, 3)])
def test_fused_cosines_and_sines_are_those_of_chunks_positions(platform, sizes, dtype):
    embedding, scale = yarn()(LONGEST)
    cosines, sines = ((turned * scale).to(dtype) for turned in (embedding.cos(), embedding.sin()))
    rotary = positioned(yarn())
    for _ in range(2):  # layers or micro-batches: the cache of a longer chunk must not shift a shorter chunk
        for chunk, size in chunks(*sizes):
            rotary.chunk = chunk
            found = rotary.get_cached_cos_sin(size, dtype=dtype, packed_seq=False)
            own = slice(chunk.start, chunk.start + size)
            for actual, expected in zip(found, (cosines, sines), strict=True):
                assert actual.equal(expected[own])
                assert actual.is_contiguous()  # the kernel asserts it
            unfused, _ = rotary(size)
            assert unfused.equal(embedding[own])
        rotary.chunk = None
        whole, _ = rotary.get_cached_cos_sin(LONGEST, dtype=dtype)
        assert whole.equal(cosines)


def test_unfused_embedding_has_the_chunks_positions(platform):
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    embedding = RotaryEmbedding(CHANNELS, 1.0, use_cpu_initialization=True)(LONGEST)
    rotary = positioned(RotaryEmbedding(CHANNELS, 1.0, use_cpu_initialization=True))
    for chunk, size in chunks(3, 14, 7) * 2:
        rotary.chunk = chunk
        assert rotary(size).equal(embedding[chunk.start : chunk.start + size])
    assert not hasattr(rotary, "get_cached_cos_sin"), "a fused kernel could use it, and would also need positions"
