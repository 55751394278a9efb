"""Sizes of chunks, with and without a multiple that they keep."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lancet.schedule.chunk_sizes import chunk_sizes, most_chunks, multiple_along
from megatron_lancet.schedule.plan import Segment


@pytest.mark.parametrize(
    ("tokens", "tokens_per_unit", "multiple"),
    [
        (1, 4096, 1),
        (16, 4096, 1),  # a sample of 4096 positions: any number of samples
        (16, 100, 4),  # 4 samples of 100 positions are 400 = 25 * 16 tokens
        (16, 1, 16),  # positions of one sample
        (16, 4, 4),  # positions of 4 samples
        (32, 6, 16),
        (128, 3, 128),
    ],
)
def test_chunk_multiple_along_a_dimension(tokens, tokens_per_unit, multiple):
    assert multiple_along(tokens, tokens_per_unit) == multiple


@pytest.mark.parametrize(("size", "multiple", "most"), [(7, 1, 7), (64, 16, 4), (72, 16, 1), (16, 16, 1), (8, 16, 1)])
def test_most_chunks_of_a_multiple(size, multiple, most):
    assert most_chunks(size, multiple) == most


@pytest.mark.parametrize(
    ("size", "num_chunks", "multiple", "sizes"),
    [
        (64, 2, 16, [32, 32]),
        (80, 2, 16, [48, 32]),
        (112, 3, 16, [48, 32, 32]),
        (64, 4, 16, [16, 16, 16, 16]),
        (4096, 3, 128, [1408, 1408, 1280]),
        (72, 1, 16, [72]),  # whole: as in stock Megatron, whatever it does with such a size
        (8, 1, 16, [8]),
    ],
)
def test_chunk_sizes_keep_a_multiple(size, num_chunks, multiple, sizes):
    assert chunk_sizes(size, num_chunks, multiple) == sizes
    assert Segment(1, None, num_chunks, chunk_multiple=multiple).chunk_sizes(size) == sizes


@given(st.data())
def test_chunk_sizes_add_up_and_differ_by_one_multiple_at_most(data):
    token_multiple = data.draw(st.sampled_from([1, 16, 32, 128, 64]), "token_multiple")
    other = data.draw(st.integers(1, 300), "tokens_per_unit")
    multiple = multiple_along(token_multiple, other)
    size = data.draw(st.integers(1, 600), "size")
    most = most_chunks(size, multiple)
    num_chunks = data.draw(st.integers(1, most), "num_chunks")
    sizes = chunk_sizes(size, num_chunks, multiple)
    assert (len(sizes), sum(sizes)) == (num_chunks, size)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] > 0
    if num_chunks > 1:
        assert all(part * other % token_multiple == 0 for part in sizes)
        assert sizes[0] - sizes[-1] in (0, multiple)
        # No smaller number of units would do, and no more chunks would fit.
        assert all(fewer * other % token_multiple for fewer in range(1, multiple))
    assert size % multiple or size // multiple == most


@given(st.integers(1, 400), st.integers(1, 40))
def test_sizes_that_keep_a_multiple_by_chance_are_those_with_it(size, multiple):
    """A plan that does not name the multiple, and whose sizes obey it, cuts as one that does."""
    for num_chunks in range(2, min(size, 9)):
        sizes = chunk_sizes(size, num_chunks)
        if all(part % multiple == 0 for part in sizes) and multiple > 1:
            assert sizes == chunk_sizes(size, num_chunks, multiple)
