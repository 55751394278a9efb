"""Plans in words: a reader finds every setting that the plan's syntax has."""

from dataclasses import replace

import pytest

from megatron_lancet.features.dedup.order import DEDUP
from megatron_lancet.features.two_hop.order import TWO_HOP
from megatron_lancet.plan_words import plan_in_words, plan_text
from megatron_lancet.schedule.plan import (
    ChunkDim,
    DwPolicy,
    LocalTokens,
    OverlapRange,
    Plan,
    Segment,
    fixed_plan,
    paired,
    plan_without_overlap,
)

NONE, AT_ONCE = DwPolicy.NONE, "weight gradients at once"
TWO = f"two chunks along the batch, {AT_ONCE}"
TWO_NONE = fixed_plan(2, NONE)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (plan_without_overlap(), "no overlap"),
        (replace(plan_without_overlap(), fused_attention=True), "no overlap, fused attention"),
        (TWO_NONE, TWO),
        (fixed_plan(12, NONE), f"12 chunks along the batch, {AT_ONCE}"),
        (fixed_plan(2, NONE, ChunkDim.SEQUENCE), f"two chunks along the sequence, {AT_ONCE}"),
        (
            fixed_plan(2, NONE, overlap_range=OverlapRange.GATE),
            f"two chunks along the batch from the router to the combine, {AT_ONCE}",
        ),
        (
            fixed_plan(2, NONE, overlap_range=OverlapRange.EXPERTS),
            f"two chunks along the batch from the dispatch to the combine, {AT_ONCE}",
        ),
        (fixed_plan(2, NONE, chunk_multiple=16), f"two chunks along the batch in multiples of 16, {AT_ONCE}"),
        (fixed_plan(1), "whole micro-batches, weight gradients deferred by up to two all-to-alls"),
        (
            fixed_plan(2, dw_memory_bytes=64_500_000),
            "two chunks along the batch, weight gradients deferred by up to four all-to-alls, which keep at most "
            "64.5 MB",
        ),
        (
            fixed_plan(1, NONE, tiles=2),
            f"whole micro-batches, rows in two tiles, half of the local tokens during the dispatch, {AT_ONCE}",
        ),
        (
            fixed_plan(1, NONE, tiles=1, local_tokens=LocalTokens.AFTER),
            f"whole micro-batches, rows in one tile, local tokens during the combine, {AT_ONCE}",
        ),
        (
            fixed_plan(1, NONE, tiles=2, local_tokens=LocalTokens.TILED),
            f"whole micro-batches, rows in two tiles, local tokens in the tiles, {AT_ONCE}",
        ),
        (replace(TWO_NONE, dispatch=DEDUP), f"two chunks along the batch, one row per token and rank, {AT_ONCE}"),
        (replace(TWO_NONE, dispatch=TWO_HOP), f"two chunks along the batch, one row per token and node, {AT_ONCE}"),
        (replace(TWO_NONE, fused_attention=True), f"{TWO}, fused attention"),
        (paired(TWO_NONE), f"{TWO}, each backward beside the next forward"),
        (
            paired(fixed_plan(1, NONE), TWO_NONE),
            f"whole micro-batches, {AT_ONCE}, each backward beside the next forward, at the two ends of a step two "
            "chunks along the batch",
        ),
        (
            paired(fixed_plan(1), fixed_plan(2)),
            "whole micro-batches, weight gradients deferred by up to two all-to-alls, each backward beside the next "
            "forward, at the two ends of a step two chunks along the batch, weight gradients deferred by up to four "
            "all-to-alls",
        ),
        (
            Plan((Segment(1, 2, 2), Segment(3, None, 1)), NONE),
            f"layers 1 to 2: two chunks along the batch, layers 3 to the last: whole micro-batches, {AT_ONCE}",
        ),
    ],
    ids=str,
)
def test_each_setting_has_words(plan, words):
    assert plan_in_words(plan) == words


def test_the_syntax_follows_in_brackets():
    assert plan_text(TWO_NONE) == f"{TWO} (chunks=2 dim=batch range=stack dw=none dw-window=0)"
