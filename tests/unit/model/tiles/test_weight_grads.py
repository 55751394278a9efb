"""Factors of a dW that come in parts, and are put together in the order of their sources."""

from contextlib import suppress
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_lancet.errors import UsageError
from megatron_lancet.features.tiles.support import model_blocker
from megatron_lancet.features.tiles.weight_grads import GatheredWeightGrads, PartOfRows, Piece, pieces_of
from megatron_lancet.runtime.factors import Factors
from megatron_lancet.runtime.weight_grad_store import WeightGradStore
from megatron_lancet.schedule.dw_queue import DwRules
from tests.fakes import cpu_stats

ROWS = st.integers(1, 4).flatmap(
    lambda sources: st.lists(st.lists(st.integers(0, 3), min_size=sources, max_size=sources), min_size=1, max_size=5)
)


@given(ROWS)
def test_pieces_put_rows_by_part_in_the_order_of_their_sources(rows_oS):
    """Rows are numbered as if all had come in one message: by source, and there by part."""
    number = 0
    numbers: list[list[int]] = [[] for _ in rows_oS]
    for of_source in zip(*rows_oS, strict=True):
        for part, num_rows in enumerate(of_source):
            numbers[part] += range(number, number + num_rows)
            number += num_rows
    pieces = pieces_of(rows_oS)
    assert [row for part, start, end in pieces for row in numbers[part][start:end]] == list(range(number))
    assert all(start < end for _, start, end in pieces)
    assert all(before.part != after.part for before, after in pairwise(pieces))


def test_rows_of_one_source_are_one_piece_of_each_part():
    assert pieces_of([[2, 0], [0, 1], [0, 3]]) == [Piece(0, 0, 2), Piece(1, 0, 1), Piece(2, 0, 3)]
    assert pieces_of([[2, 3]]) == [Piece(0, 0, 5)]


def gathered(rows_oSe: list[list[list[int]]], store: WeightGradStore | None = None) -> GatheredWeightGrads:
    return GatheredWeightGrads(len(rows_oSe), lambda: torch.tensor(rows_oSe), {"fc1": 0}, store)


def test_weight_grad_is_complete_with_the_last_part():
    weight_grads = gathered([[[1], [0]], [[0], [2]], [[1], [0]]])
    factors = [Factors(torch.rand(rows, 3), torch.rand(rows, 5)) for rows in (1, 2, 1)]
    assert weight_grads.add("fc1", 0, 2, factors[2]) is None
    assert weight_grads.add("fc1", 0, 0, factors[0]) is None
    whole = weight_grads.add("fc1", 0, 1, factors[1])
    assert whole.num_bytes == 4 * (3 + 5) * 4
    for joined, of_parts in zip(whole.joined(), zip(*factors, strict=True), strict=True):
        assert joined.equal(torch.cat((of_parts[0], of_parts[2], of_parts[1])))
    weight_grads.add("fc1", 0, 1, factors[1])
    with pytest.raises(AssertionError, match="part 1 has come twice"):
        weight_grads.add("fc1", 0, 1, factors[1])


def test_weight_grad_of_an_idle_expert_has_no_rows():
    weight_grads = gathered([[[0]], [[0]]])
    nothing = Factors(torch.rand(0, 3), torch.rand(0, 5))
    assert weight_grads.add("fc1", 0, 0, nothing) is None
    whole = weight_grads.add("fc1", 0, 1, nothing)
    assert whole.joined().grad_TO.t().matmul(whole.joined().input_TI).equal(torch.zeros(3, 5))


def test_linear_layers_are_in_a_part_inside_its_context_only():
    store = WeightGradStore(DwRules(window=1), cpu_stats())
    weight_grads = gathered([[[1]], [[1]]], store)
    assert store.part is None
    with weight_grads.in_part(1):
        assert store.part == PartOfRows(weight_grads, 1)
        with suppress(UsageError), weight_grads.in_part(0):
            assert store.part.part == 0
            raise UsageError("an error inside")
        assert store.part.part == 1
    assert store.part is None


def test_tiles_are_refused_with_what_to_change():
    assert model_blocker(is_quantized=False, has_row_bound=False) is None
    advice = [
        found.advice
        for quantized in (True, False)
        if (found := model_blocker(is_quantized=quantized, has_row_bound=True)) is not None
    ]
    assert advice == ["drop --fp8-format or --fp4-format", "drop --lancet-max-expert-rows"]
