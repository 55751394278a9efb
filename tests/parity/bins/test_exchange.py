"""Samples reach the rank that computes them, whole and once, and a resumed run deals them alike."""

from itertools import chain, pairwise

import pytest

from megatron_lancet.config import BinsChoice
from megatron_lancet.schedule.documents.bins import balanced, first_fit, padded
from tests.parity.bins.exchange_worker import (
    COST,
    MAX_TOKENS,
    NUM_BINS,
    NUM_RANKS,
    NUM_STEPS,
    SAMPLES_OF_STACK,
    all_results,
    labelled,
    tokens,
)
from tests.ranks import launch

pytestmark = pytest.mark.distributed

DEALT = {
    BinsChoice.BALANCED: lambda drawn: balanced(drawn, NUM_BINS, COST, MAX_TOKENS),
    BinsChoice.FIRST_FIT: lambda drawn: first_fit(drawn, NUM_BINS, MAX_TOKENS),
    BinsChoice.PADDED: lambda drawn: padded(drawn, NUM_BINS, COST, MAX_TOKENS),
}


results = launch.results(all_results, NUM_RANKS, timeout_s=90)
"""Per rank: what is found for each case."""


def samples_of(batch, is_padded):
    """Tokens and labels that count, of each sample that a batch has; what fills up has no sample."""
    rows = len(batch["tokens"])
    found = []
    for row in range(rows):
        bounds = batch["cu_seqlens"][row]
        assert bounds[-1] == len(batch["tokens"][row])
        assert bounds[-1] % 2 == 0
        assert bounds[-1] >= 4
        for begin, end in pairwise(bounds):
            inputs, labels, mask = (batch[name][row][begin:end] for name in ("tokens", "labels", "loss_mask"))
            length = len(labels) - next((at for at, label in enumerate(reversed(labels)) if label), len(labels))
            if length:
                assert batch["position_ids"][row][begin : begin + length] == list(range(length))
                assert not any(inputs[length:] + mask[length:])
                assert is_padded or length == end - begin
                found.append(([*inputs[:length], labels[length - 1]], [bool(one) for one in mask[:length]]))
    return found


@pytest.mark.parametrize("choice", list(BinsChoice))
def test_every_rank_has_the_bins_of_one_dealing(results, choice):
    num_samples = NUM_BINS * SAMPLES_OF_STACK
    for step in range(NUM_STEPS):
        rows = [[tokens(rank, step, index) for index in range(num_samples)] for rank in range(NUM_RANKS)]
        dealing = DEALT[choice]([[len(row) - 1 for row in rank] for rank in rows])
        every = list(chain.from_iterable(rows))
        for rank, result in enumerate(results):
            found = [samples_of(batch, choice is BinsChoice.PADDED) for batch in result[choice]["whole"][step]]
            expected = [[every[index] for index in indices] for indices in dealing.bins[rank]]
            assert found == [[(row, labelled(row)[1:]) for row in rows_of_bin] for rows_of_bin in expected]


@pytest.mark.parametrize("choice", list(BinsChoice))
def test_resumed_run_has_the_same_batches(results, choice):
    for result in results:
        assert result[choice]["resumed"] == result[choice]["whole"][-1:]
        assert len(result[choice]["whole"]) == NUM_STEPS
