"""The ways of packing with which the benchmark compares balanced bins: each sample once, bounds kept, the best cut."""

import random
from itertools import chain, combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.bins.baselines import first_fit, padded
from benchmarks.bins.cases import FIRST_FIT, PADDED, computed_tokens
from benchmarks.harness.cases import Shape
from megatron_lancet.planning.documents.cost import DocumentCost
from tests.unit.schedule.documents.test_bins import assert_each_sample_once, steps

WAYS = {
    FIRST_FIT: lambda drawn, num_bins, cost, max_tokens: first_fit(drawn, num_bins, max_tokens),
    PADDED: padded,
}


@given(steps(), st.sampled_from(sorted(WAYS)), st.sampled_from([0.0, 0.02, 3.0]), st.integers(1, 200))
def test_each_sample_is_in_one_bin_and_bounds_are_kept(step, way, tokens_per_pair, max_tokens):
    drawn, num_bins = step
    dealing = WAYS[way](drawn, num_bins, DocumentCost(tokens_per_pair), max_tokens)
    assert_each_sample_once(dealing, drawn, num_bins)
    most = max(chain.from_iterable(computed_tokens(way, drawn, dealing, Shape(seq_length=64))))
    assert most <= dealing.max_tokens
    assert dealing.max_tokens in (max_tokens, most)


@given(st.lists(st.integers(1, 30), min_size=4, max_size=9), st.integers(1, 3), st.sampled_from([0.0, 0.05]))
def test_padded_is_the_best_of_all_cuts_on_one_rank(lengths, num_bins, tokens_per_pair):
    cost = DocumentCost(tokens_per_pair)
    falling = sorted(lengths, reverse=True)

    def step(cuts):
        return sum((end - first) * cost.of(falling[first]) for first, end in pairwise((0, *cuts, len(falling))))

    best = min(step(cuts) for cuts in combinations(range(1, len(falling)), num_bins - 1))
    [bins] = padded([lengths], num_bins, cost, 10**6).bins
    assert sum(len(one) * cost.of(max(lengths[index] for index in one)) for one in bins) == pytest.approx(best)


def test_padded_program_of_a_large_step_is_done_in_parts():
    dice = random.Random(7)
    drawn = [[max(1, min(4096, int(dice.lognormvariate(5.5, 1.0)))) for _ in range(64)] for _ in range(16)]
    dealing = padded(drawn, 8, DocumentCost(1 / 2000), 10**6)
    assert sorted(chain.from_iterable(chain.from_iterable(dealing.bins))) == list(range(16 * 64))
    assert [len(rank) for rank in dealing.bins] == [8] * 16
    num_computed = sum(map(sum, computed_tokens(PADDED, drawn, dealing, Shape(seq_length=4096))))
    assert 1 - sum(map(sum, drawn)) / num_computed < 0.25


def test_first_fit_keeps_samples_on_their_rank_and_in_order():
    dealing = first_fit([[5, 6, 3, 2], [9, 9, 9]], 2, 10)
    assert dealing.bins == (((0, 2, 3), (1,)), ((4, 6), (5,)))
    assert dealing.max_tokens == 18  # the third sample of rank 1 has no room, and goes to the emptiest bin


@pytest.mark.parametrize("way", sorted(WAYS))
def test_fewer_samples_than_bins_are_refused(way):
    with pytest.raises(ValueError, match=r"2 bins .*need at least .*samples"):
        WAYS[way]([[5], [5]], 2, DocumentCost(0.0), 10)
