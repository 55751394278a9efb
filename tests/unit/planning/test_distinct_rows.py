"""Distinct rows: the expected number against counting, and recorded ones."""

import dataclasses
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.synthetic_profile import Machine, synthetic_profile
from megatron_lancet.planning.distinct_rows import DistinctParts, expected_part_of_tokens
from megatron_lancet.planning.profile import ChunkRouting
from megatron_lancet.schedule.plan import ChunkDim


def facts(num_experts: int, num_ranks: int, topk: int):
    model = synthetic_profile(Machine(shares=(1 / num_ranks,) * num_ranks, topk=topk)).model
    return dataclasses.replace(model, num_experts=num_experts)


@pytest.mark.parametrize(("num_experts", "num_ranks", "topk"), [(8, 2, 4), (8, 4, 2), (8, 4, 8), (12, 3, 5), (9, 3, 1)])
def test_expected_rows_are_those_of_all_choices_of_experts(num_experts, num_ranks, topk):
    num_local = num_experts // num_ranks
    choices = [{expert // num_local for expert in chosen} for chosen in combinations(range(num_experts), topk)]
    with_rank_0 = sum(0 in ranks for ranks in choices) / len(choices)
    assert expected_part_of_tokens(num_experts, num_local, topk) == pytest.approx(with_rank_0)
    parts = DistinctParts.of(facts(num_experts, num_ranks, topk), (1 / num_ranks,) * num_ranks)
    to_others = sum(len(ranks - {0}) for ranks in choices) / len(choices)
    plain = topk * (num_ranks - 1) / num_ranks
    assert parts.sent == pytest.approx((to_others / plain,) * num_ranks)
    assert parts.returned == pytest.approx(parts.sent)
    assert parts.of_all == pytest.approx(to_others / plain)


def test_published_layouts_send_as_many_rows_as_the_formula_says():
    """Qwen3-30B-A3B on 8 ranks: 7.00 rows of a token to others become 4.67."""
    parts = DistinctParts.of(facts(128, 8, 8), (1 / 8,) * 8)
    assert 7.0 * parts.of_all == pytest.approx(4.67, abs=0.005)


@given(
    st.lists(st.floats(0.0, 1.0), min_size=2, max_size=6).filter(lambda weights: sum(weights) > 0.1),
    st.integers(2, 4),
    st.integers(1, 12),
)
def test_distinct_rows_are_never_more_than_plain_ones(weights, num_local, topk):
    shares = [weight / sum(weights) for weight in weights]
    num_experts = num_local * len(shares)
    parts = DistinctParts.of(facts(num_experts, len(shares), min(topk, num_experts)), shares)
    assert all(0 <= part <= 1 for part in (*parts.sent, *parts.returned, parts.of_all))


def chunk(sent, sent_tokens):
    received_tokens = None if sent_tokens is None else sent_tokens[::-1]
    return ChunkRouting(1, ChunkDim.BATCH, 1, 0, sent, (100, 100), sent_tokens, received_tokens)


def test_recorded_rows_scale_the_expected_ones():
    even, expected = (0.5, 0.5), DistinctParts.of(facts(8, 2, 4), (0.5, 0.5))
    half = round(100 * expected.of_all / 2)
    found = DistinctParts.of(facts(8, 2, 4), even, [chunk((60, 40), (half - 5, 5)), chunk((60, 40), None)])
    assert found.of_all == pytest.approx(half / 100)
    assert found.sent == pytest.approx((half / 100,) * 2)
    every_row_distinct = DistinctParts.of(facts(8, 2, 4), even, [chunk((60, 40), (60, 40))])
    assert every_row_distinct.of_all == pytest.approx(1.0)
