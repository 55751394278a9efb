"""Causes of made-up steps are those that were put in, with their sizes, and sum to what was waited for."""

import dataclasses

import pytest

from megatron_lancet.lab.causes import replay
from megatron_lancet.lab.causes.attribution import NOTHING_LEFT, causes_of, merged
from megatron_lancet.lab.causes.program import Code, Programs, fixed_rows
from megatron_lancet.lab.causes.replay import Cause, Step
from megatron_lancet.lab.causes.traced import CannotReplay, TracedRank
from megatron_lancet.lab.causes.weight_grads import Deferred, without_weight_grads
from megatron_lancet.lab.causes.wire import LinkKind
from megatron_lancet.schedule.timeline import Lane, RankTimeline, Span
from tests.unit.planning.causes.steps import Made

GLOO = LinkKind(dispatches_apart=True)
KINDS = [GLOO, LinkKind(), LinkKind(sends_share_link=False)]
PLAIN = Made()
ROUTE = (0, "L2.c0.F.route")


def exposed_ms(made: Made) -> float:
    return Step(made.ranks(), GLOO).exposed_ms


@pytest.mark.parametrize("kind", KINDS, ids=["gloo", "one order", "nccl"])
@pytest.mark.parametrize(
    ("made", "cause", "who", "size"),
    [
        (Made(rows=(200, 800)), Cause.ROWS, 1, 1.6),
        (Made(rows=(1100, 300, 300, 300)), Cause.ROWS, 0, 2.2),
        (Made(pace={1: 1.5}), Cause.PACE, 1, 1.2),
        (Made(late_ms={0: 30.0}), Cause.PACE, 0, None),
        (Made(blocked_ms={ROUTE: 40.0}), Cause.HOST, 0, 40.0),
        (Made(ms_per_byte=4e-5), Cause.WIRE, None, 200.0),
    ],
    ids=["rows", "rows of four", "slow rank", "late rank", "host", "wire"],
)
def test_what_a_cause_adds_is_its_part(made, cause, who, size, kind):
    """The difference to the same step without it, which is known, is found: to the bit of the arithmetic."""
    made = dataclasses.replace(made, has_collectives=not kind.sends_share_link)
    plain = Made(rows=(500,) * len(made.rows))
    without, found = causes_of(plain.ranks(), kind), causes_of(made.ranks(), kind)
    part = found.parts[cause]
    assert part.ms - without.parts[cause].ms == pytest.approx(exposed_ms(made) - exposed_ms(plain), abs=0.01)
    assert found.unexplained_ms == pytest.approx(0.0, abs=0.01)
    others = {name: ms - without.by_name()[name] for name, ms in found.by_name().items() if name != cause}
    assert max(others, key=lambda name: others[name]) != cause
    assert part.who == who
    if size is not None:
        assert part.size == pytest.approx(size, rel=1e-3)


def test_tiles_have_one_op_and_parts_of_experts_their_rows():
    spans = (
        Span("L1.c0.F.counts", Lane.COMM, 1.0, 3.0),
        Span("L1.c0.F.preprocess", Lane.COMPUTE, 1.0, 2.0),
        *(Span(f"L1.c0.t{tile}.F.dispatch", Lane.COMM, 3.0, 5.0 + tile, 1000) for tile in (0, 1)),
        Span("L1.c0.t0.F.own_experts", Lane.COMPUTE, 2.0, 3.5),
        *(Span(f"L1.c0.t{tile}.F.experts", Lane.COMPUTE, 5.0 + tile, 6.0 + tile) for tile in (0, 1)),
    )
    rows = {"L1.c0.t0.F.own_experts": (30,), "L1.c0.t0.F.experts": (20,), "L1.c0.t1.F.experts": (21,)}
    ranks = [TracedRank(RankTimeline(rank, spans, 7.0), 0.0, rows) for rank in (0, 1)]
    programs = Programs.of(ranks)
    launches = [item for item in programs.items[0] if item.code is Code.LAUNCH and item.needs is not None]
    assert [(item.key[0], item.needs[0]) for item in launches] == [
        (f"L1.c0.t{tile}.F.dispatch", "L1.c0.F.counts") for tile in (0, 1)
    ]
    before = programs.items[0].index(launches[0]) - 1
    assert programs.items[0][before].key == ("L1.c0.F.preprocess", 0)
    of_experts = {name: op.rows for (name, _), op in programs.ops.items() if op.rows}
    assert list(of_experts) == list(rows)


@pytest.mark.parametrize("kind", KINDS, ids=["gloo", "one order", "nccl"])
def test_parts_sum_to_measured_time_with_several_causes_at_once(kind):
    made = Made(rows=(300, 700, 600, 400), pace={2: 1.3}, blocked_ms={ROUTE: 25.0}, late_ms={3: 4.0}, counts_ms=4.0)
    found = causes_of(made.ranks(), kind)
    assert sum(found.by_name().values()) == pytest.approx(exposed_ms(made))
    assert min(found.parts[cause].ms for cause in (Cause.ROWS, Cause.PACE, Cause.HOST, Cause.WIRE)) > 1.0
    assert found.by_name()[NOTHING_LEFT] == pytest.approx(0.0, abs=1e-6)


def test_counts_are_a_cause_where_dispatches_wait_for_them():
    """Between its counts and its dispatch a rank computes for 2 ms."""
    found = causes_of(Made(ms_per_byte=0.0, counts_ms=7.0).ranks(), GLOO)
    num_exchanges = 3 * 2
    assert found.parts[Cause.COUNTS].ms == pytest.approx(num_exchanges * (7.0 - 2.0))
    assert found.parts[Cause.COUNTS].size == pytest.approx(num_exchanges * 7.0)
    assert found.parts[Cause.WIRE].ms == pytest.approx(0.0, abs=1e-6)


def test_a_step_without_waits_has_no_causes():
    found = causes_of(Made(ms_per_byte=0.0, counts_ms=0.0).ranks(), GLOO)
    assert set(found.by_name().values()) == {0.0}


@pytest.mark.parametrize("ranks", [(0, 1), (0,)], ids=["both", "one rank"])
def test_late_message_is_the_wires_only_if_late_on_all_ranks(ranks):
    """The last message arrives 50 ms later than the link explains, with nothing behind it that waits."""
    made, before = [], causes_of(Made(num_layers=6).ranks(), GLOO)
    for traced in Made(num_layers=6).ranks():
        if traced.rank not in ranks:
            made.append(traced)
            continue
        last_ms = max(span.end_ms for span in traced.timeline.spans if span.lane is Lane.WAIT)
        spans = [moved(span, 50.0) if span.start_ms >= last_ms else span for span in traced.timeline.spans]
        spans = [dataclasses.replace(s, end_ms=s.end_ms + 50.0) if s.end_ms == last_ms else s for s in spans]
        made.append(dataclasses.replace(traced, timeline=dataclasses.replace(traced.timeline, spans=tuple(spans))))
    found = causes_of(made, GLOO)
    added = {name: ms - before.by_name()[name] for name, ms in found.by_name().items()}
    assert found.exposed_ms - before.exposed_ms == pytest.approx(25.0 * len(ranks))
    assert added["wire"] == pytest.approx(50.0 if len(ranks) == 2 else 25.0, abs=0.5)
    assert sum(added.values()) == pytest.approx(25.0 * len(ranks))


def moved(span, by_ms):
    return dataclasses.replace(span, start_ms=span.start_ms + by_ms, end_ms=span.end_ms + by_ms)


def test_what_goes_if_one_cause_alone_goes_is_told_apart():
    """Rank 0 has more rows and is slower by as much: removing either alone helps less than removing both."""
    found = causes_of(Made(rows=(600, 400), pace={0: 1.5}).ranks(), GLOO)
    assert found.parts[Cause.ROWS].alone_ms == pytest.approx(found.parts[Cause.ROWS].ms)  # it is removed first
    assert found.parts[Cause.WIRE].alone_ms > found.parts[Cause.WIRE].ms  # it is removed last
    both = found.parts[Cause.ROWS].ms + found.parts[Cause.PACE].ms
    assert both > max(found.parts[Cause.ROWS].alone_ms, found.parts[Cause.PACE].alone_ms)


def test_time_between_ops_is_hosts_where_device_waits_for_it():
    """On CUDA nothing runs between the start of the step and the first op of rank 0 for 12 ms."""
    ranks = Made().ranks()
    first = ranks[0].on_clock(12.0)
    late = [dataclasses.replace(first, start_ms=0.0), ranks[1]]
    on_host = [dataclasses.replace(rank, follows_host=True) for rank in late]
    assert causes_of(on_host, GLOO).parts[Cause.HOST].ms > 4.0
    assert causes_of(late, GLOO).parts[Cause.HOST].ms == 0.0


def test_corrected_clock_changes_nothing():
    ranks = Made(pace={1: 1.5}).ranks()
    ahead = [ranks[0], ranks[1].on_clock(1000.0)]
    again = [ahead[0], ahead[1].on_clock(-1000.0)]
    expected, found = causes_of(ranks, GLOO), causes_of(again, GLOO)
    assert found.by_name() == pytest.approx(expected.by_name(), abs=1e-6)
    assert causes_of(ahead, GLOO).by_name() != pytest.approx(expected.by_name(), abs=1.0)


def test_many_rows_that_take_longer_each_are_no_drift():
    uneven = Made(rows=(200, 800), fixed_ms=-1.0)
    found = causes_of(uneven.ranks(), GLOO)
    expected = exposed_ms(uneven) - exposed_ms(Made(fixed_ms=-1.0))
    assert found.parts[Cause.ROWS].ms == pytest.approx(expected, abs=0.01)
    assert found.parts[Cause.PACE].ms == pytest.approx(0.0, abs=0.01)


@pytest.mark.parametrize("change", ["one rank", "another step"])
def test_traces_that_do_not_belong_together_are_refused(change):
    ranks = Made().ranks()
    others = [ranks[0], ranks[0]] if change == "one rank" else [ranks[0], Made(num_layers=4).ranks()[1]]
    with pytest.raises(CannotReplay, match=r"expected the traces of at least two ranks|expected the same messages"):
        causes_of(others, GLOO)


def test_groups_are_merged_to_their_mean_and_name_the_worst():
    slow, even = causes_of(Made(pace={1: 1.5}).ranks(), GLOO), causes_of(Made().ranks(), GLOO)
    found = merged([even, slow])
    assert found.exposed_ms == pytest.approx((slow.exposed_ms + even.exposed_ms) / 2)
    assert sum(found.by_name().values()) == pytest.approx(found.exposed_ms)
    assert (found.parts[Cause.PACE].who, found.parts[Cause.PACE].size) == (1, slow.parts[Cause.PACE].size)


def test_fixed_time_in_rows_is_found_where_rows_differ():
    line = [(rows, 3.0 + 0.01 * rows) for rows in (200, 400, 800)]
    assert fixed_rows(line) == pytest.approx(300.0)
    assert fixed_rows([(500, 8.0), (502, 9.0)]) == 0.0
    assert fixed_rows([(200, 9.0), (800, 8.0)]) == 500.0  # at most the mean
    assert fixed_rows([(200, 1.8), (800, 8.4)]) == pytest.approx(-400 / 11)  # many rows take longer each than few
    assert fixed_rows([(200, 1.0), (800, 8.0)]) == -100.0  # half of the fewest remain


def test_fixed_time_of_experts_is_no_cost_of_rows():
    """And none of pace: both ranks are equally fast."""
    without, made = (Made(rows=rows, fixed_ms=4.0) for rows in ((500, 500), (200, 800)))
    before, found = causes_of(without.ranks(), GLOO), causes_of(made.ranks(), GLOO)
    assert found.parts[Cause.ROWS].ms == pytest.approx(exposed_ms(made) - exposed_ms(without), abs=0.01)
    assert found.parts[Cause.PACE].ms == pytest.approx(before.parts[Cause.PACE].ms, abs=0.01)


def test_a_slow_rank_with_more_rows_is_both():
    """Its pace in the other ops tells that its experts are not slow because of rows alone."""
    slow, both = Made(pace={1: 1.5}), Made(pace={1: 1.5}, rows=(200, 800))
    found = causes_of(both.ranks(), GLOO)
    assert sum(found.parts[cause].ms for cause in (Cause.ROWS, Cause.PACE)) == pytest.approx(
        exposed_ms(both) - exposed_ms(PLAIN), abs=0.01
    )
    assert found.parts[Cause.PACE].ms == pytest.approx(exposed_ms(slow) - exposed_ms(PLAIN), abs=0.01)
    assert found.parts[Cause.ROWS].ms == pytest.approx(exposed_ms(both) - exposed_ms(slow), abs=0.01)


@pytest.mark.parametrize(
    ("made", "cause"),
    [
        (Made(has_backward=True, pace={1: 1.5}), Cause.PACE),
        (Made(has_backward=True, rows=(200, 800)), Cause.ROWS),
        (Made(has_backward=True, ms_per_byte=4e-5), Cause.WIRE),
    ],
    ids=["slow rank", "rows", "wire"],
)
def test_weight_gradients_run_in_other_waits_without_the_cause(made, cause):
    """Each rank runs them in front of its own waits: the replay finds the step that there would be without it."""
    without = Made(has_backward=True)
    before, found = causes_of(without.ranks(), GLOO), causes_of(made.ranks(), GLOO)
    assert found.unexplained_ms == pytest.approx(0.0, abs=0.01)
    assert found.by_name()[NOTHING_LEFT] == pytest.approx(0.0, abs=0.01)
    gained_ms = found.parts[cause].alone_ms - before.parts[cause].alone_ms
    added_ms = exposed_ms(made) - exposed_ms(without)
    # Without drift both ranks take the mean of their paces, and hide more than two fast ones do.
    assert gained_ms == pytest.approx(added_ms, abs=0.01 if cause is not Cause.PACE else 0.1 * exposed_ms(made))


def test_replay_with_dws_in_their_old_place_is_wrong(monkeypatch):
    """The control of the test above."""
    monkeypatch.setattr(replay, "without_weight_grads", lambda items: Deferred(tuple(items)))
    made, without = Made(has_backward=True, rows=(200, 800)), Made(has_backward=True)
    before, found = causes_of(without.ranks(), GLOO), causes_of(made.ranks(), GLOO)
    gained_ms = found.parts[Cause.ROWS].alone_ms - before.parts[Cause.ROWS].alone_ms
    assert abs(gained_ms - (exposed_ms(made) - exposed_ms(without))) > 5.0


def test_dws_stay_where_they_were_if_their_op_is_unknown():
    (items, _) = Step(Made(has_backward=True).ranks(), GLOO).programs.items
    found = without_weight_grads(items)
    assert {one.item.code for one in found.weight_grads} == {Code.WEIGHT_GRAD}
    assert len(found.items) + len(found.weight_grads) == len(items)
    assert all(one.after <= one.before for one in found.weight_grads)
    unknown = [item._replace(name="L9.W.self_attention.linear_qkv") if item.name else item for item in items]
    assert without_weight_grads(unknown) == (tuple(unknown), ())
