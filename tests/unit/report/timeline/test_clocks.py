"""Clocks of ranks with made-up offsets and latencies."""

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lancet.lab.views.clocks import aligned, clock_corrections_ms
from megatron_lancet.schedule.timeline import Lane, RankTimeline, Span
from tests.draws import examples

TOLERANCE_MS = 1e-6


def true_messages(seed: int, num_ranks: int, num_messages: int = 12):
    """Starts and ends in true time, [num_messages][num_ranks], and the latency of each pair: [sender][receiver]."""
    draw = random.Random(seed)
    starts, ends = [], []
    latency_ms = [
        [[draw.uniform(0.05, 8.0) for _ in range(num_ranks)] for _ in range(num_ranks)] for _ in range(num_messages)
    ]
    now_ms = 0.0
    for message in range(num_messages):
        issued = [now_ms + draw.uniform(0, 5.0) for _ in range(num_ranks)]
        come = [
            max(issued[sender] + latency_ms[message][sender][rank] for sender in range(num_ranks))
            for rank in range(num_ranks)
        ]
        starts.append(issued)
        ends.append(come)
        now_ms = max(come)
    return starts, ends


def timelines(starts, ends, offsets_ms):
    """As the ranks would write them, each on its own clock."""
    return [
        RankTimeline(
            rank,
            tuple(
                Span(
                    f"L{1 + index // 2}.c0.F.{('dispatch', 'combine')[index % 2]}",
                    Lane.COMM,
                    start[rank] + offset,
                    end[rank] + offset,
                    64,
                )
                for index, (start, end) in enumerate(zip(starts, ends, strict=True))
            ),
            100.0,
        )
        for rank, offset in enumerate(offsets_ms)
    ]


def latencies_ms(starts, ends):
    """The smallest latency of a message, [sender][receiver]: along other ranks too, if that is less."""
    ranks = range(len(starts[0]))
    found = [
        [min(end[to] - start[sender] for start, end in zip(starts, ends, strict=True)) for to in ranks]
        for sender in ranks
    ]
    for middle, sender, to in itertools.product(ranks, repeat=3):
        found[sender][to] = min(found[sender][to], found[sender][middle] + found[middle][to])
    return found


@examples(60)
@given(seed=st.integers(0, 10**6), num_ranks=st.integers(2, 5))
def test_aligned_clocks_keep_causality_with_bounded_error(seed, num_ranks):
    draw = random.Random(seed + 1)
    offsets_ms = [draw.uniform(-5000, 5000) for _ in range(num_ranks)]
    starts, ends = true_messages(seed, num_ranks)
    recorded = timelines(starts, ends, offsets_ms)
    together = aligned(recorded)
    for index in range(len(starts)):
        latest_start = max(timeline.spans[index].start_ms for timeline in together)
        assert all(timeline.spans[index].end_ms >= latest_start - TOLERANCE_MS for timeline in together)
    corrections_ms = clock_corrections_ms(recorded)
    latency_ms = latencies_ms(starts, ends)
    pairs = list(itertools.permutations(range(num_ranks), 2))
    asymmetry_ms = max(abs(latency_ms[one][other] - latency_ms[other][one]) for one, other in pairs)
    allowed_ms = asymmetry_ms / 2 if num_ranks == 2 else asymmetry_ms  # two halves: of each rank and the others
    for one, other in pairs:
        recovered_ms = corrections_ms[one] - corrections_ms[other]
        assert abs(recovered_ms - (offsets_ms[other] - offsets_ms[one])) <= allowed_ms + TOLERANCE_MS


def test_clock_offsets_are_exact_with_equal_latencies():
    recorded = timelines([[0, 0, 0], [10, 10, 10]], [[2, 2, 2], [12, 12, 12]], [0.0, 700.0, -40.0])
    corrections_ms = clock_corrections_ms(recorded)
    assert corrections_ms[0] - corrections_ms[1] == pytest.approx(700)
    assert corrections_ms[2] - corrections_ms[0] == pytest.approx(40)


def test_clock_alignment_is_idempotent():
    starts, ends = true_messages(3, 3)
    once = aligned(timelines(starts, ends, [0, 3000, -200]))
    for before, after in zip(once, aligned(once), strict=True):
        assert [span.start_ms for span in after.spans] == pytest.approx([span.start_ms for span in before.spans])


def test_clocks_of_ranks_without_messages_stay():
    one = timelines([[0]], [[3]], [17.0])
    assert aligned(one) == tuple(one)
    silent = [
        RankTimeline(rank, (Span("F.head", Lane.COMPUTE, 5.0 * rank, 9.0 * rank + 1),), 10.0) for rank in range(3)
    ]
    assert aligned(silent) == tuple(silent)
    empty = [RankTimeline(rank, (), 10.0) for rank in range(2)]
    assert aligned(empty) == tuple(empty)
    assert aligned([]) == ()


def test_clocks_of_groups_are_aligned_separately():
    recorded = timelines([[0, 0, 50, 50]], [[2, 2, 52, 52]], [0.0, 30.0, 0.0, 90.0])
    corrections_ms = clock_corrections_ms(recorded, [[0, 1], [2, 3]])
    assert corrections_ms[0] - corrections_ms[1] == pytest.approx(30)
    assert corrections_ms[2] - corrections_ms[3] == pytest.approx(90)
    assert corrections_ms[0] == corrections_ms[2] == 0


def test_rank_that_sent_nothing_does_not_affect_clock_alignment():
    late = timelines([[0, 40], [100, 100]], [[2, 42], [102, 102]], [0.0, 0.0])
    spans = (replace(late[1].spans[0], num_bytes=0), late[1].spans[1])
    corrections_ms = clock_corrections_ms([late[0], replace(late[1], spans=spans)])
    assert corrections_ms == pytest.approx({0: 0, 1: 0})


def test_contradicting_clock_bounds_are_widened_little():
    # Each rank has the message 1 ms before the other sent it: some 1 ms is wrong, and the middle shares it out.
    contradictory = timelines([[10, 10]], [[9, 9]], [0.0, 500.0])
    corrections_ms = clock_corrections_ms(contradictory)
    assert corrections_ms[0] - corrections_ms[1] == pytest.approx(500)


def test_clock_alignment_matches_messages_by_micro_batch():
    def rank(number, offset_ms):
        spans = [Span("L1.c0.F.counts", Lane.COMM, at + offset_ms, at + 1 + offset_ms, 8) for at in (0, 20, 40)]
        return RankTimeline(number, tuple(spans), 50.0)

    corrections_ms = clock_corrections_ms([rank(0, 0.0), rank(1, 23.0)])
    assert corrections_ms[0] - corrections_ms[1] == pytest.approx(23)


def test_clocks_compare_hop_only_between_ranks_that_it_connects():
    """A rank has its rows of a hop before others have begun to send, with whom it exchanges none."""
    slow = {0: 0.0, 1: 100.0, 2: 0.0, 3: 100.0}  # true start of the first hop; the second ranks of both nodes are late
    recorded = []
    for rank, start_ms in slow.items():
        between = Span("L1.c0.F.node_dispatch", Lane.COMM, start_ms, start_ms + 2.0, 64)
        inside = Span("L1.c0.F.local_dispatch", Lane.COMM, 100.0 + start_ms / 100, 103.0, 64)
        recorded.append(RankTimeline(rank, (between, inside), 110.0))
    corrections_ms = clock_corrections_ms(recorded, [[0, 1, 2, 3]], ranks_per_node=2)
    assert max(corrections_ms.values()) - min(corrections_ms.values()) <= 1.0
    assert clock_corrections_ms(recorded, [[0, 1, 2, 3]]) == dict.fromkeys(range(4), 0.0)  # nothing is known
    as_one_group = [
        replace(one, spans=tuple(replace(span, name=span.name.replace("node_", "")) for span in one.spans))
        for one in recorded
    ]
    wrong_ms = clock_corrections_ms(as_one_group, [[0, 1, 2, 3]], ranks_per_node=2)
    assert wrong_ms[0] - wrong_ms[1] > 40
