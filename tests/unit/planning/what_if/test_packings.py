"""Steps of documents by hand: what a column costs, what ways of packing make of the same documents, and bad input."""

import dataclasses
import json

import pytest

from benchmarks.synthetic_profile import Machine, synthetic_profile
from megatron_lancet.data.lengths import as_json, read_lengths
from megatron_lancet.errors import UsageError
from megatron_lancet.lab.what_if.document_times import (
    ColumnTimes,
    MicroBatch,
    PairShares,
    as_one_sample,
    document_cost,
    given_pair_shares,
    measured_pair_shares,
    profiled,
)
from megatron_lancet.lab.what_if.packings import (
    Setting,
    documents_that_fill,
    draw,
    in_steps,
    packings,
    predict_packings,
)
from megatron_lancet.planning.documents.cost import DocumentCost, num_pairs
from megatron_lancet.schedule.ops import OpKind, Phase
from megatron_lancet.schedule.plan import ChunkDim, DwPolicy, Pairing, fixed_plan

OP_MS = {OpKind.ATTENTION: 4.0, OpKind.ROUTE: 1.0, OpKind.PREPROCESS: 1.0, OpKind.EXPERTS: 6.0, OpKind.HEAD: 3.0}
OP_MS |= {OpKind.EMBEDDING: 0.0, OpKind.CUT: 0.0, OpKind.POSTPROCESS: 0.0}
DW_MS = {OpKind.ATTENTION: 2.0, OpKind.EXPERTS: 5.0}
OWN_MS, EXPERTS_MS = 2 * (2 * (4 + 1 + 1) + 2) + 2 * 3, 2 * (2 * 6 + 5)
"""Of two layers forward and backward with their weight gradients, and the head's."""
PLAN = fixed_plan(1, DwPolicy.NONE)
HALF = PairShares(0.5, 0.5)
SEQUENCE, BATCH = 3200, 2
BASE = MicroBatch(6400, 2 * num_pairs(3200))
"""The profiled micro-batch."""
CLOSE = 1e-4
"""Rows are whole numbers."""


def profile_of(dims=(ChunkDim.SEQUENCE,), attention_ms=None, **changes):
    """Of a machine whose messages take no time.

    Args:
        attention_ms: of a token and of a pair; None for times without pairs.
    """
    plain = {"op_ms": OP_MS, "dw_ms": DW_MS, "link_ms": 0.0, "latency_ms": 0.0, "counts_ms": 0.0, "overhead_ms": 0.0}
    sizes = {"micro_batch_size": BATCH, "seq_length": SEQUENCE, "rest_ms": 10.0, "num_micro_batches": 3}
    profile = synthetic_profile(Machine("mm", dims=dims, **plain, **sizes, **changes))
    if attention_ms is None:
        return profile

    def timed(op):
        if op.kind != OpKind.ATTENTION:
            return op
        length = SEQUENCE // op.num_chunks
        tokens, pairs = BATCH * length, BATCH * num_pairs(length, length * op.chunk)
        return dataclasses.replace(op, ms=tokens * attention_ms[0] + pairs * attention_ms[1])

    return dataclasses.replace(profile, ops=tuple(map(timed, profile.ops)))


def times_of(profile, shares=HALF, plan=PLAN):
    return ColumnTimes(as_one_sample(profile), plan, shares, profiled(profile.model))


def test_share_of_pairs_is_found_in_the_times_of_chunks():
    by_token, by_pair = 0.3, 0.0002
    shares = measured_pair_shares(profile_of(attention_ms=(by_token, by_pair)))
    whole = profiled(profile_of().model)
    assert whole == BASE
    expected = by_pair * whole.num_pairs / (by_token * whole.num_tokens + by_pair * whole.num_pairs)
    assert shares.of(Phase.FORWARD) == pytest.approx(expected)
    assert shares.of(Phase.INPUT_GRAD) == pytest.approx(expected)
    alone = measured_pair_shares(profile_of(attention_ms=(by_token, 0.0)))
    assert alone.forward == pytest.approx(0.0, abs=1e-9)


def test_cost_of_documents_is_the_same_both_ways():
    profile = profile_of(attention_ms=(0.03, 0.00002))
    cost = document_cost(profile, measured_pair_shares(profile))
    tokens_ms = OWN_MS - 2 * 2 * 4 + 2 * 2 * 0.03 * 6400
    pair_ms = 2 * 2 * 0.00002  # two layers, forward and backward
    assert cost.tokens_per_pair == pytest.approx(pair_ms / (tokens_ms / 6400))
    assert document_cost(profile, given_pair_shares(profile, cost)).tokens_per_pair == pytest.approx(
        cost.tokens_per_pair
    )


def test_column_takes_its_slowest_rank_and_the_mean_rows():
    times = times_of(profile_of())
    assert times.column_ms([BASE, BASE]) == pytest.approx(OWN_MS + EXPERTS_MS)
    twice = MicroBatch(12800, 2 * BASE.num_pairs)
    assert times.column_ms([twice, BASE]) == pytest.approx(2 * OWN_MS + 1.5 * EXPERTS_MS, rel=CLOSE)
    assert times.compute_ms([twice, BASE]) == pytest.approx([2 * OWN_MS + 1.5 * EXPERTS_MS, OWN_MS + 1.5 * EXPERTS_MS])
    # Half of attention's time is for pairs: one document has about twice those of two of its half.
    more_ms = 2 * 2 * 4 * 0.5 * (num_pairs(6400) / BASE.num_pairs - 1)
    assert times.column_ms([MicroBatch.packed([6400]), BASE]) == pytest.approx(OWN_MS + EXPERTS_MS + more_ms)


@pytest.mark.parametrize("num_chunks", [2, 4])
def test_chunks_of_a_column_cost_what_their_parts_do(num_chunks):
    plan = fixed_plan(num_chunks, DwPolicy.NONE, chunk_dim=ChunkDim.SEQUENCE)
    times = times_of(profile_of(attention_ms=(1e-3, 1e-6)), plan=plan)
    half = MicroBatch(3200, BASE.num_pairs // 2)
    assert times.column_ms([half, half]) == pytest.approx(0.5 * times.column_ms([BASE, BASE]))


IN_ORDER = [
    [MicroBatch.packed([3200, 3200]), MicroBatch.packed([800])],
    [MicroBatch.packed([800, 800]), MicroBatch.packed([800])],
]
"""The documents of ``DRAWN``, in the order drawn."""
SETTING = Setting(
    num_ranks=2, ep_size=2, num_stages=1, num_micro_batches=2, num_documents=3, num_rows=2, seq_length=3200
)
DRAWN = [[3200, 3200, 800], [800, 800, 800]]


def test_ways_of_packing_deal_the_same_documents():
    found = {name: pack(DRAWN) for name, pack in packings(SETTING, DocumentCost(0.01)).items()}
    assert found["padded to 3200"] == [[MicroBatch.padded(2, 3200), MicroBatch.padded(1, 3200)]] * 2
    for name in ("balanced on each rank", "balanced over all ranks"):
        assert [len(rank) for rank in found[name]] == [2, 2]
        assert sum(batch.num_tokens for rank in found[name] for batch in rank) == 9600
    of_columns = [
        {batch.num_tokens for batch in column} for column in zip(*found["balanced over all ranks"], strict=True)
    ]
    assert of_columns == [{3200}, {1600}]


@pytest.mark.parametrize("num_stages", [1, 2])
def test_step_is_the_sum_of_its_columns(num_stages):
    setting = dataclasses.replace(SETTING, num_stages=num_stages)
    times = times_of(profile_of(), PairShares(0.0, 0.0))
    ways = {"in order": lambda drawn: IN_ORDER, **packings(setting, DocumentCost(0.0))}
    by_name = {step.name: step for step in predict_packings([DRAWN], setting, ways, times, 10.0)}
    # Columns of 6400 and 1600, then of 800 and 800 tokens.
    columns = [OWN_MS + 0.625 * EXPERTS_MS, (OWN_MS + EXPERTS_MS) / 8]
    step_ms = sum(columns) + (num_stages - 1) * columns[0] + 10
    in_order = by_name["in order"]
    assert in_order.step_ms == pytest.approx(step_ms, rel=CLOSE)
    assert in_order.tokens_per_s == pytest.approx(9600 / step_ms * 1e3, rel=CLOSE)
    assert in_order.spread == pytest.approx(0.75 * OWN_MS / sum(columns), rel=CLOSE)
    assert in_order.over_first == 1.0
    balanced = (OWN_MS + EXPERTS_MS) * (0.75 + (num_stages - 1) * 0.5) + 10
    assert by_name["balanced over all ranks"].step_ms == pytest.approx(balanced, rel=CLOSE)
    assert by_name["balanced over all ranks"].spread == pytest.approx(0.0)
    assert by_name["balanced over all ranks"].over_first == pytest.approx(step_ms / balanced, rel=CLOSE)
    rows = by_name["padded to 3200"]
    assert (rows.num_micro_batches, rows.padding) == (2, pytest.approx(0.5))
    assert rows.step_ms == pytest.approx((OWN_MS + EXPERTS_MS) * (1.5 + num_stages - 1) + 10, rel=CLOSE)


def test_draw_has_the_documents_of_the_histogram():
    histogram = in_steps({1: 100, 5: 3, 33: 1, 99: 1}, 32)
    assert histogram == {4: 3, 32: 2}
    assert documents_that_fill(histogram, 76 / 5 * 7) == 7
    setting = dataclasses.replace(SETTING, num_documents=400)
    steps = draw(histogram, setting, 2, seed=1)
    assert steps == draw(histogram, setting, 2, seed=1) != draw(histogram, setting, 2, seed=2)
    drawn = [length for ranks in steps for rank in ranks for length in rank]
    assert len(drawn) == 2 * 2 * 400
    assert set(drawn) == {4, 32}
    assert 0.5 < drawn.count(4) / len(drawn) < 0.7
    with pytest.raises(UsageError, match="no document has two tokens"):
        in_steps({1: 4}, 32)


def test_what_can_not_be_predicted_is_refused():
    profile = profile_of(dims=(ChunkDim.BATCH,))
    with pytest.raises(UsageError, match="no times of attention in chunks along the sequence"):
        measured_pair_shares(profile)
    with pytest.raises(UsageError, match=r"--attention-cost 1 would make attention longer .* expected at most 0\.0"):
        given_pair_shares(profile, DocumentCost(1.0))
    with pytest.raises(UsageError, match="--pairing off"):
        times_of(profile_of(), plan=dataclasses.replace(PLAN, pairing=Pairing(PLAN.segments)))
    few = dataclasses.replace(SETTING, num_documents=1)
    with pytest.raises(UsageError, match="1 documents of a step on a rank are fewer than its 2 micro-batches"):
        predict_packings([[[32], [8]]], few, packings(few, DocumentCost(0.0)), times_of(profile_of()), 0.0)


def test_lengths_are_read_as_written_or_refused_in_a_line(tmp_path):
    file = tmp_path / "lengths.json"
    file.write_text(as_json({240: 1, 17: 3, 9: 0}))
    assert read_lengths(file) == {17: 3, 240: 1}
    for content, reason in (
        ('{"lengths": [17]}', 'expected {"lengths"'),
        ('{"lengths": {"0": 1}}', "expected tokens of a document, at least 1, found '0'"),
        ('{"lengths": {"-3": 1}}', "found '-3'"),
        ('{"lengths": {"17": true}}', "expected a number of documents of 17 tokens, found True"),
        ('{"lengths": {"17": -1}}', "found -1"),
        ('{"lengths": {}}', "has no document"),
        ("17", "expected an object"),
        ("{", "no JSON"),
    ):
        file.write_text(content)
        with pytest.raises(UsageError) as error:
            read_lengths(file)
        assert reason in str(error.value)
        assert "\n" not in str(error.value)
    with pytest.raises(UsageError, match=r"no lengths at .*none"):
        read_lengths(tmp_path / "none")
    assert json.loads(as_json({3: 1})) == {"lengths": {"3": 1}}
