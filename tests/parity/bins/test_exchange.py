"""Samples reach the rank that computes them, whole and once, and a resumed run deals them alike."""

from itertools import chain, pairwise

import pytest

from megatron_lancet.planning.documents.bins import balanced
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


results = launch.results(all_results, NUM_RANKS, timeout_s=90)
"""Per rank: what is found for each case."""


def samples_of(batch):
    """Tokens and labels that count, of each sample that a batch has; what fills up has no sample."""
    [tokens], [bounds] = batch["tokens"], batch["cu_seqlens"]
    assert bounds[-1] == len(tokens)
    assert bounds[-1] % 2 == 0
    assert bounds[-1] >= 4
    found = []
    for begin, end in pairwise(bounds):
        inputs, labels, mask = (batch[name][0][begin:end] for name in ("tokens", "labels", "loss_mask"))
        if any(labels):
            assert batch["position_ids"][0][begin:end] == list(range(end - begin))
            found.append(([*inputs, labels[-1]], [bool(one) for one in mask]))
    return found


def test_every_rank_has_the_bins_of_one_dealing(results):
    num_samples = NUM_BINS * SAMPLES_OF_STACK
    for step in range(NUM_STEPS):
        rows = [[tokens(rank, step, index) for index in range(num_samples)] for rank in range(NUM_RANKS)]
        dealing = balanced([[len(row) - 1 for row in rank] for rank in rows], NUM_BINS, COST, MAX_TOKENS)
        every = list(chain.from_iterable(rows))
        for rank, result in enumerate(results):
            found = [samples_of(batch) for batch in result["whole"][step]]
            expected = [[every[index] for index in indices] for indices in dealing.bins[rank]]
            assert found == [[(row, labelled(row)[1:]) for row in rows_of_bin] for rows_of_bin in expected]


def test_resumed_run_has_the_same_batches(results):
    for result in results:
        assert result["resumed"] == result["whole"][-1:]
        assert len(result["whole"]) == NUM_STEPS
