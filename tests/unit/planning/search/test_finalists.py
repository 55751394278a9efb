"""The few plans that are worth measuring."""

from dataclasses import replace

import pytest

from benchmarks.synthetic_profile import Machine, synthetic_profile
from megatron_lancet.features.dedup.order import DEDUP
from megatron_lancet.features.two_hop.order import TWO_HOP
from megatron_lancet.planning.dispatch import with_dispatch
from megatron_lancet.planning.search.finalists import (
    CLOSE_PART,
    EQUAL_PART,
    NUM_FINALISTS,
    distinct,
    kind_of,
    simplicity,
    with_another_dispatch,
)
from megatron_lancet.planning.search.planner import make_plan
from megatron_lancet.planning.search.search_space import Limits
from megatron_lancet.schedule.dispatch import PLAIN
from megatron_lancet.schedule.plan import ChunkDim, DwPolicy, Gap, OverlapRange, Plan, Segment, fixed_plan, paired

TWO, FOUR, SEQUENCE = fixed_plan(2), fixed_plan(4), fixed_plan(2, chunk_dim=ChunkDim.SEQUENCE)
WHOLE, AT_ONCE = fixed_plan(1), fixed_plan(1, DwPolicy.NONE)
SMALL = Limits(chunk_dims=(ChunkDim.BATCH,), ranges=(OverlapRange.STACK,), dw_window_layers=(1,))


def in_parts(*chunks: int) -> Plan:
    """A segment of one layer for each number of chunks but the last, which has the others."""
    ends = [*range(1, len(chunks)), None]
    return replace(
        TWO, segments=tuple(Segment(first, ends[first - 1], count) for first, count in enumerate(chunks, start=1))
    )


@pytest.mark.parametrize(
    "other",
    [
        replace(TWO, gaps=(Gap("L1.c0.I.combine", ("L2.W.proj",)),)),
        replace(TWO, dw_window=8),
        fixed_plan(2, DwPolicy.NONE),
        in_parts(2, 2, 2),
    ],
)
def test_plans_of_one_kind_hide_messages_in_the_same_way(other):
    assert kind_of(other) == kind_of(TWO)


def test_kinds_differ():
    from_router = fixed_plan(2, overlap_range=OverlapRange.GATE)
    plans = [WHOLE, AT_ONCE, TWO, from_router, FOUR, SEQUENCE, fixed_plan(1, tiles=2), paired(WHOLE), paired(TWO)]
    plans += [in_parts(2, 4), paired(WHOLE, TWO)]
    assert len({kind_of(plan) for plan in plans}) == len(plans)
    assert kind_of(paired(TWO, FOUR)) == kind_of(paired(TWO))


def test_simplest_of_equal_plans_of_each_kind_is_kept():
    variant = replace(TWO, dw_window=8)
    found = [(variant, 100.0), (TWO, 100.0 * EQUAL_PART), (FOUR, 102.1), (SEQUENCE, 102.2), (paired(TWO), 103.0)]
    assert distinct(found, 3) == [TWO, FOUR, SEQUENCE]
    assert distinct(found[:2], 3) == [TWO]
    assert distinct([(variant, 100.0), (TWO, 100.1 * EQUAL_PART)], 3) == [variant]


def test_plan_at_the_ends_needs_a_gain():
    with_ends = paired(TWO, FOUR)
    assert distinct([(with_ends, 100.0), (paired(TWO), 101.9)], 3) == [paired(TWO)]
    assert distinct([(with_ends, 100.0), (paired(TWO), 102.1)], 3) == [with_ends]


def test_deferred_weight_gradients_race_where_plans_are_close():
    at_once = replace(TWO, dw_policy=DwPolicy.NONE, dw_window=0)
    assert distinct([(at_once, 100.0), (TWO, 101.9)], 3) == [TWO]
    assert distinct([(at_once, 100.0), (TWO, 102.1)], 3) == [at_once]
    assert distinct([(TWO, 100.0), (at_once, 101.9)], 3) == [TWO]


def test_whole_micro_batches_race_with_and_without_cut_ends():
    """At the ends only chunks hide messages, so one plan has ops of sizes that the other lacks."""
    found = [(paired(WHOLE, TWO), 100.0), (paired(WHOLE), 101.9), (paired(TWO), 102.0)]
    assert distinct(found, 3) == [plan for plan, _ in found]


def test_plans_that_are_predicted_slow_are_left_out():
    assert distinct([(TWO, 100.0), (FOUR, 100.0 * CLOSE_PART), (SEQUENCE, 101.0 * CLOSE_PART)], 3) == [TWO, FOUR]


def test_plans_with_ops_of_the_same_sizes_come_last():
    """A wrong cost of an op makes all of them look fast."""
    from_router = fixed_plan(2, overlap_range=OverlapRange.GATE)
    found = [(paired(TWO), 100.0), (from_router, 101.0), (TWO, 102.0), (SEQUENCE, 110.0), (FOUR, 112.0)]
    assert distinct(found, 3) == [paired(TWO), SEQUENCE, FOUR]
    assert distinct(found, 5) == [paired(TWO), SEQUENCE, FOUR, from_router, TWO]


def test_fastest_other_dispatch_runs_only_if_it_is_close():
    gaps = (Gap("L1.c0.I.combine", ("L2.W.proj",)),)
    pairs = paired(TWO)
    plan = replace(pairs, gaps=gaps, pairing=replace(pairs.pairing, end_gaps=gaps))
    times_ms = {DEDUP: 110.0, TWO_HOP: 105.0}
    dispatches = (PLAIN, DEDUP, TWO_HOP)
    fastest = with_another_dispatch(plan, 100.0, dispatches, lambda other: times_ms[other.dispatch])
    assert fastest == with_dispatch(pairs, TWO_HOP), "as many layers of deferred dWs"
    assert fastest.dw_window == 2 * pairs.dw_window
    assert with_another_dispatch(plan, 105.0 / CLOSE_PART - 0.1, dispatches, lambda _: 105.0) is None
    assert with_another_dispatch(plan, 100.0, (PLAIN,), lambda _: 0.0) is None


def test_simpler_plans_come_first():
    ordered = [AT_ONCE, WHOLE, TWO, FOUR, in_parts(1, 2), paired(AT_ONCE), paired(TWO)]
    keys = [simplicity(plan) for plan in ordered]
    assert keys == sorted(keys)
    assert len(set(keys)) == len(keys)


def test_search_lists_the_kind_of_its_choice_first_each_time():
    profile = synthetic_profile(Machine())
    first, second = make_plan(profile, SMALL), make_plan(profile, SMALL)
    assert first.finalists == second.finalists
    assert kind_of(first.finalists[0]) == kind_of(first.plan)
    assert simplicity(first.finalists[0]) <= simplicity(first.plan)
    kinds = [kind_of(plan) for plan in first.finalists]
    assert 1 < len(kinds) == len(set(kinds)) <= NUM_FINALISTS


def test_finalists_fit_into_memory():
    profile = synthetic_profile(Machine())
    free = make_plan(profile, SMALL)
    bound = max(one.prediction.peak_bytes for one in free.alternatives if one.plan.num_chunks == 2) + 1
    tight = make_plan(profile, replace(SMALL, max_memory_bytes=bound))
    peaks = {one.plan: one.prediction.peak_bytes for one in tight.alternatives}
    assert all(peaks[plan] <= bound for plan in tight.finalists)
    least = make_plan(profile, replace(SMALL, max_memory_bytes=1))
    assert least.warning is not None
    assert least.finalists == (least.plan,)
