"""Properties of dealing samples to bins: each sample once, equal counts of bins, bounds kept, and bins nearly even."""

import random
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lancet.planning.documents.bins import Dealing, balanced, bin_tokens, predicted
from megatron_lancet.planning.documents.cost import DocumentCost


@st.composite
def steps(draw):
    """Samples drawn by 1 to 4 ranks, at least one for each bin of a rank, and the number of bins."""
    num_ranks, num_bins, more = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(0, 5))
    lengths = st.lists(st.integers(1, 64), min_size=num_bins + more, max_size=num_bins + more)
    return [draw(lengths) for _ in range(num_ranks)], num_bins


def assert_each_sample_once(dealing: Dealing, drawn: list[list[int]], num_bins: int) -> None:
    assert [len(rank) for rank in dealing.bins] == [num_bins] * len(drawn)
    assert all(indices for rank in dealing.bins for indices in rank)
    dealt = sorted(chain.from_iterable(chain.from_iterable(dealing.bins)))
    assert dealt == list(range(sum(map(len, drawn))))


def skewed(num_ranks, num_samples, sigma=1.0):
    random_lengths = random.Random(7)
    return [
        [max(1, min(4096, int(random_lengths.lognormvariate(5.5, sigma)))) for _ in range(num_samples)]
        for _ in range(num_ranks)
    ]


@given(steps(), st.sampled_from([0.0, 0.02, 3.0]), st.integers(1, 200))
def test_each_sample_is_in_one_bin_and_bounds_are_kept(step, tokens_per_pair, max_tokens):
    drawn, num_bins = step
    dealing = balanced(drawn, num_bins, DocumentCost(tokens_per_pair), max_tokens)
    assert_each_sample_once(dealing, drawn, num_bins)
    most = max(chain.from_iterable(bin_tokens(drawn, dealing)))
    assert most <= dealing.max_tokens
    assert dealing.max_tokens in (max_tokens, most)


@given(steps(), st.integers(1, 64))
def test_bound_is_raised_only_where_samples_do_not_fit(step, max_tokens):
    drawn, num_bins = step
    lengths = list(chain.from_iterable(drawn))
    dealing = balanced(drawn, num_bins, DocumentCost(0.1), max_tokens)
    least = max(max(lengths), -(-sum(lengths) // (len(drawn) * num_bins)))
    if max_tokens >= sum(lengths):
        assert dealing.max_tokens == max_tokens
    assert dealing.max_tokens >= min(least, max_tokens)
    # Largest first by tokens is at most 4/3 of the best packing, which is at most the mean and the longest sample.
    assert dealing.max_tokens <= max(max_tokens, 4 / 3 * (sum(lengths) / (len(drawn) * num_bins) + max(lengths)))


@pytest.mark.parametrize(("num_ranks", "num_bins", "sigma"), [(2, 4, 1.0), (8, 8, 0.5), (16, 4, 1.0)])
def test_balanced_bins_are_nearly_even(num_ranks, num_bins, sigma):
    drawn = skewed(num_ranks, 8 * num_bins, sigma)
    cost = DocumentCost(1 / 2000)
    found = predicted(drawn, balanced(drawn, num_bins, cost, 2 * 4096), cost)
    computed = sum(cost.of(length) for length in chain.from_iterable(drawn))
    assert computed / num_ranks <= found.step <= 1.01 * computed / num_ranks
    assert found.spread < 0.02
    in_order = [range(first, first + 8) for first in range(0, 8 * num_bins * num_ranks, 8)]
    dealing = Dealing(
        tuple(tuple(map(tuple, in_order[rank * num_bins : (rank + 1) * num_bins])) for rank in range(num_ranks)), 0
    )
    unsorted = predicted(drawn, dealing, cost)
    assert found.step < 0.95 * unsorted.step
    assert unsorted.waiting > 0.05


def test_column_of_a_long_sample_is_filled_on_all_ranks():
    drawn = [[10, *[1] * 14], [1] * 16]  # 40 tokens: 20 a rank, of which the long sample is half
    dealing = balanced(drawn, 4, DocumentCost(0.0), 100)
    assert predicted(drawn, dealing, DocumentCost(0.0)).step == 20
    assert [tokens[0] for tokens in bin_tokens(drawn, dealing)] == [10, 10]


def test_prediction_of_two_stages():
    drawn = [[4, 2], [2, 2]]
    dealing = Dealing((((0,), (1,)), ((2,), (3,))), 4)
    found = predicted(drawn, dealing, DocumentCost(0.0), num_stages=2)
    assert found.bin_costs == ((4, 2), (2, 2))
    assert found.step == 4 + 2 + 4
    assert found.spread == pytest.approx(1 - (2 + 2) / (4 + 2))
    assert found.num_tokens == 10


def test_fewer_samples_than_bins_are_refused():
    with pytest.raises(ValueError, match=r"2 bins .*need at least .*samples"):
        balanced([[5], [5]], 2, DocumentCost(0.0), 10)
