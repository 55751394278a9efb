"""Cuts of sequences of documents."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lancet.planning.documents.cost import DocumentCost
from megatron_lancet.planning.documents.cuts import NEAR, cut_sizes
from megatron_lancet.schedule.chunk_sizes import chunk_sizes

LINEAR = DocumentCost(0.0)


@pytest.mark.parametrize(
    ("samples", "num_chunks", "cost", "sizes"),
    [
        ([[16]], 1, LINEAR, [16]),
        ([[16]], 4, LINEAR, [4, 4, 4, 4]),
        ([[1] * 16], 4, DocumentCost(1.0), [4, 4, 4, 4]),
        ([[48, 52]], 2, LINEAR, [48, 52]),  # at the end of the document that is near
        ([[30, 70]], 2, LINEAR, [50, 50]),  # none is near
        ([[49, 51], [52, 48], [52, 48]], 2, LINEAR, [52, 48]),  # the end that most samples have
        ([[100]], 2, DocumentCost(1000.0), [71, 29]),  # half of the pairs: 100 / sqrt(2) positions
        ([[90, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]], 2, DocumentCost(1000.0), [64, 36]),
        ([[50, 50]], 2, DocumentCost(1000.0), [50, 50]),
    ],
)
def test_cuts(samples, num_chunks, cost, sizes):
    assert cut_sizes(samples, num_chunks, cost) == sizes


@st.composite
def _cases(draw):
    multiple = draw(st.sampled_from([1, 2, 8]))
    num_positions = multiple * draw(st.integers(1, 64))
    samples = []
    for _ in range(draw(st.integers(1, 3))):
        ends = draw(st.sets(st.integers(1, num_positions), max_size=20)) | {0, num_positions}
        samples.append([end - start for start, end in zip(sorted(ends), sorted(ends)[1:], strict=False)])
    num_chunks = draw(st.integers(1, num_positions // multiple))
    return samples, num_chunks, DocumentCost(draw(st.sampled_from([0.0, 0.01, 1.0]))), multiple


@given(_cases())
def test_chunks_have_the_wanted_number_and_multiple(case):
    samples, num_chunks, cost, multiple = case
    sizes = cut_sizes(samples, num_chunks, cost, multiple)
    assert len(sizes) == num_chunks
    assert sum(sizes) == sum(samples[0])
    assert all(size > 0 and (num_chunks == 1 or size % multiple == 0) for size in sizes)


@given(st.integers(64, 512), st.integers(1, 8), st.sampled_from([0.0, 0.1]))
def test_chunks_of_one_document_cost_nearly_the_same(num_positions, num_chunks, tokens_per_pair):
    cost, start, costs = DocumentCost(tokens_per_pair), 0, []
    for size in cut_sizes([[num_positions]], num_chunks, cost):
        costs.append(cost.of(size, start))
        start += size
    dearest_token = cost.of(1, num_positions - 1)
    assert max(costs) - min(costs) <= 2 * dearest_token


@given(st.lists(st.integers(1, 64), min_size=1, max_size=30), st.integers(1, 4))
def test_a_chunk_ends_at_most_so_far_from_its_share(lengths, num_chunks):
    cost, num_positions = DocumentCost(0.05), sum(lengths)
    if num_chunks > num_positions:
        return
    sizes = cut_sizes([lengths], num_chunks, cost)
    share = sum(map(cost.of, lengths)) / num_chunks
    dearest_token = cost.of(1, max(lengths) - 1)
    ends = [sum(sizes[: index + 1]) for index in range(num_chunks - 1)]
    for index, end in enumerate(ends, start=1):
        is_squeezed = end - (ends[index - 2] if index > 1 else 0) == 1 or num_positions - end == num_chunks - index
        assert is_squeezed or abs(_cost_up_to(lengths, cost, end) - index * share) <= NEAR * share + dearest_token


def _cost_up_to(lengths, cost, position):
    total, start = 0.0, 0
    for length in lengths:
        total += cost.of(max(0, min(length, position - start)))
        start += length
    return total


@given(st.integers(1, 64), st.integers(1, 8))
def test_cuts_without_documents_are_equal_sizes(num_positions, num_chunks):
    if num_chunks <= num_positions:
        sizes = cut_sizes([[num_positions]], num_chunks, LINEAR)
        assert max(sizes) - min(sizes) <= 1
        assert sorted(sizes) == sorted(chunk_sizes(num_positions, num_chunks))
