import dataclasses
from itertools import pairwise

import pytest

from benchmarks.synthetic_profile import Machine, synthetic_profile
from megatron_lancet.files.reader import RecordError
from megatron_lancet.planning.profile import ChunkRouting, profile_from_json
from megatron_lancet.planning.simulation.cost_model import CostModel
from megatron_lancet.planning.simulation.simulator import PlanMismatch, Simulator, simulate
from megatron_lancet.schedule.dw_queue import AT_ONCE
from megatron_lancet.schedule.layers import LayerKind
from megatron_lancet.schedule.ops import OpKind, Phase
from megatron_lancet.schedule.plan import ChunkDim, DwPolicy, Gap, OverlapRange, Plan, Segment, fixed_plan
from megatron_lancet.schedule.timeline import Lane, RankTimeline
from tests.unit.planning.strategies import ALONE, UNEVEN

OPS_MS = {"attention": 4.0, "route": 1.0, "preprocess": 1.0, "experts": 6.0, "postprocess": 1.0, "mlp": 5.0}
BY_HAND = Machine(
    layers="m", op_ms=OPS_MS, dw_ms={}, link_ms=4.0, latency_ms=0.0, counts_ms=0.0, overhead_ms=0.0, rest_ms=0.0
)
CLOSE_MS = 1e-9


def text_of(timeline, *lanes):
    """One line per span, for comparison with schedules that were worked out by hand."""
    return [
        f"{span.lane} {span.start_ms:g}-{span.end_ms:g} {span.name}" for span in timeline.spans if span.lane in lanes
    ]


def test_timeline_of_two_chunks_equals_the_one_by_hand():
    simulation = simulate(synthetic_profile(BY_HAND), fixed_plan(2, DwPolicy.NONE))
    (timeline,) = simulation.timelines
    assert text_of(timeline, Lane.COMM, Lane.WAIT) == [
        "comm 3-5 L1.c0.F.dispatch",
        "comm 6-8 L1.c1.F.dispatch",
        "comm 9-11 L1.c0.F.combine",
        "comm 12-14 L1.c1.F.combine",
        "wait 12.5-14 L1.c1.F.combine",
        # The mirror: forward ends at 14.5.
        "comm 15-17 L1.c1.I.combine",
        "wait 15.5-17 L1.c1.I.combine",
        "comm 15.5-19 L1.c0.I.combine",
        "comm 20-22 L1.c1.I.dispatch",
        "comm 23-25 L1.c0.I.dispatch",
    ]
    assert text_of(timeline, Lane.COMPUTE) == [
        "compute 0-2 L1.c0.F.attention",
        "compute 2-2.5 L1.c0.F.route",
        "compute 2.5-3 L1.c0.F.preprocess",
        "compute 3-5 L1.c1.F.attention",
        "compute 5-5.5 L1.c1.F.route",
        "compute 5.5-6 L1.c1.F.preprocess",
        "compute 6-9 L1.c0.F.experts",
        "compute 9-12 L1.c1.F.experts",
        "compute 12-12.5 L1.c0.F.postprocess",
        "compute 14-14.5 L1.c1.F.postprocess",
        "compute 14.5-15 L1.c1.I.postprocess",
        "compute 15-15.5 L1.c0.I.postprocess",
        "compute 17-20 L1.c1.I.experts",
        "compute 20-23 L1.c0.I.experts",
        "compute 23-23.5 L1.c1.I.preprocess",
        "compute 23.5-24 L1.c1.I.route",
        "compute 24-26 L1.c1.I.attention",
        "compute 26-26.5 L1.c0.I.preprocess",
        "compute 26.5-27 L1.c0.I.route",
        "compute 27-29 L1.c0.I.attention",
    ]
    assert simulation.prediction.step_ms == pytest.approx(29)
    assert simulation.prediction.exposed_ms == pytest.approx(3)
    assert simulation.same_ranks == (2,)


def test_timeline_of_deferred_dws_equals_the_one_by_hand():
    machine = dataclasses.replace(BY_HAND, dw_ms={"experts": 6.0, "attention": 3.0})
    simulation = simulate(synthetic_profile(machine), fixed_plan(1))
    backward = [line for line in text_of(simulation.timelines[0], *Lane) if ".F." not in line]
    assert backward == [
        "compute 21-22 L1.c0.I.postprocess",
        "comm 22-26 L1.c0.I.combine",
        "wait 22-26 L1.c0.I.combine",  # nothing is ready yet
        "compute 26-32 L1.c0.I.experts",
        "comm 32-36 L1.c0.I.dispatch",
        "compute 32-38 L1.W.mlp.experts",  # not interrupted when the message has come
        "compute 38-39 L1.c0.I.preprocess",
        "compute 39-40 L1.c0.I.route",
        "compute 40-44 L1.c0.I.attention",
        "compute 44-47 L1.W.self_attention.linear_qkv",  # what is left at the end
    ]
    at_once = simulate(synthetic_profile(machine), fixed_plan(1, DwPolicy.NONE))
    assert at_once.prediction.step_ms == pytest.approx(47 + 4)


def test_step_of_one_chunk_is_the_sum_of_all_times():
    machine = Machine(layers="mdm", num_micro_batches=3)
    moe_ms, dense_ms, rest_ms = 4 + 0.5 + 0.5 + 6 + 0.5, 4 + 5, 0.5 + 3
    dw_ms = 2 * (3 + 6) + (3 + 5) + 2
    exposed_ms = 2 * 4 * 5
    expected = 3 * (2 * (2 * moe_ms + dense_ms + rest_ms) + dw_ms + exposed_ms) + 1
    prediction = simulate(synthetic_profile(machine), fixed_plan(1, DwPolicy.NONE)).prediction
    assert prediction.step_ms == pytest.approx(expected)
    assert prediction.exposed_ms == pytest.approx(3 * exposed_ms)
    assert prediction.exposed_forward_ms == pytest.approx(3 * exposed_ms / 2)


def test_two_chunks_hide_all_but_the_first_and_last_all_to_all():
    machine = dataclasses.replace(BY_HAND, layers="m" * 10)
    prediction = simulate(synthetic_profile(machine), fixed_plan(2, DwPolicy.NONE)).prediction
    # As in one layer: the last combine, and its mirror.
    assert prediction.exposed_ms == pytest.approx(3)
    assert prediction.step_ms == pytest.approx(10 * 26 + 3)


def test_dispatch_starts_with_its_counts_and_blocks_nothing():
    machine = dataclasses.replace(BY_HAND, counts_ms=4.0)
    (timeline,) = simulate(synthetic_profile(machine), fixed_plan(2, DwPolicy.NONE)).timelines
    # Counts of chunk 0 are issued at 2.5 and there at 6.5; armed at 3. Chunk 1 computes meanwhile.
    assert text_of(timeline, Lane.COMM, Lane.WAIT)[:3] == [
        "comm 3-8.5 L1.c0.F.dispatch",
        "wait 6-8.5 L1.c0.F.dispatch",
        "comm 6-11.5 L1.c1.F.dispatch",
    ]


def test_host_of_device_waits_for_counts_before_it_launches_more():
    """Counts of chunk 0 are issued at 2.5 and arrive at 8.5; the host stops in front of the counts of chunk 1.

    The device runs what was launched before, until 5.5, and is idle for 3 ms. In front of the combine of chunk 0 the
    host stops again until 14.5, while the device runs the experts of chunk 0 until 13.5. The dispatch of chunk 1 leaves
    then, and the combine, launched at the same time, follows it.
    """
    machine = dataclasses.replace(BY_HAND, counts_ms=6.0, sends_share_link=False, host_polls=False)
    simulation = simulate(synthetic_profile(machine), fixed_plan(2, DwPolicy.NONE))
    (timeline,) = simulation.timelines
    forward = [line for line in text_of(timeline, *Lane) if ".F." in line]
    assert forward == [
        "compute 0-2 L1.c0.F.attention",
        "compute 2-2.5 L1.c0.F.route",
        "compute 2.5-3 L1.c0.F.preprocess",
        "compute 3-5 L1.c1.F.attention",
        "comm 3-10.5 L1.c0.F.dispatch",
        "compute 5-5.5 L1.c1.F.route",
        "wait 5.5-8.5 L1.c0.F.counts",
        "compute 8.5-9 L1.c1.F.preprocess",
        "wait 9-10.5 L1.c0.F.dispatch",
        "comm 9-16.5 L1.c1.F.dispatch",
        "compute 10.5-13.5 L1.c0.F.experts",
        "wait 13.5-14.5 L1.c1.F.counts",
        "wait 14.5-16.5 L1.c1.F.dispatch",
        "comm 14.5-18.5 L1.c0.F.combine",
        "compute 16.5-19.5 L1.c1.F.experts",
        "compute 19.5-20 L1.c0.F.postprocess",
        "comm 19.5-21.5 L1.c1.F.combine",
        "wait 20-21.5 L1.c1.F.combine",
        "compute 21.5-22 L1.c1.F.postprocess",
    ]
    assert simulation.prediction.exposed_forward_ms == pytest.approx(3 + 1.5 + 1 + 2 + 1.5)


def test_host_of_a_device_waits_for_the_counts_of_a_late_rank():
    """Rank 1 is 4 ms late, so counts of chunk 0 arrive at 4 + 2.5 + 1; rank 0 has run all that it launched at 5.5."""
    machine = dataclasses.replace(BY_HAND, counts_ms=1.0, shares=(0.75, 0.25), sends_share_link=False, host_polls=False)
    simulator = Simulator(CostModel(synthetic_profile(machine)))
    (stage,) = simulator.stages(fixed_plan(2, DwPolicy.NONE))
    result = simulator.play(stage.forward, Phase.FORWARD, AT_ONCE, (0.0, 4.0), record=True)
    early, late = (
        [f"{span.start_ms:g}-{span.end_ms:g} {span.name}" for span in spans if span.lane is Lane.WAIT][:3]
        for spans in result.spans
    )
    assert early[:2] == ["5.5-7.5 L1.c0.F.counts", "8-10.5 L1.c0.F.dispatch"]
    assert late[:2] == ["10-10.5 L1.c0.F.dispatch", "12-13.5 L1.c1.F.dispatch"]
    counts = result.waits[0][0]
    assert (counts.issued_ms, counts.peers_ms, counts.end_ms) == (2.5, 6.5, 7.5)


def test_counts_that_arrive_before_device_is_idle_cost_nothing():
    machine = dataclasses.replace(BY_HAND, counts_ms=2.0, layers="mmm", sends_share_link=False)
    plan = fixed_plan(2, DwPolicy.NONE)
    device, polled = (
        simulate(synthetic_profile(dataclasses.replace(machine, host_polls=polls)), plan) for polls in (False, True)
    )
    assert device.prediction == polled.prediction
    assert device.timelines == polled.timelines
    alone = [
        simulate(synthetic_profile(dataclasses.replace(machine, host_polls=polls)), fixed_plan(1, DwPolicy.NONE))
        for polls in (False, True)
    ]
    # With one chunk nothing is enqueued behind the router but the permutation.
    assert alone[0].prediction.step_ms == alone[1].prediction.step_ms
    assert [span.name for span in alone[0].timelines[0].spans if span.lane is Lane.WAIT][:2] == [
        "L1.c0.F.counts",
        "L1.c0.F.dispatch",
    ]


def test_rank_waits_for_a_slower_rank():
    machine = dataclasses.replace(BY_HAND, shares=(0.75, 0.25))
    simulation = simulate(synthetic_profile(machine), fixed_plan(1, DwPolicy.NONE))
    busy, idle = simulation.timelines
    # Rank 0 sends a quarter of its rows away, rank 1 three quarters: 2 and 6 ms. Experts take 9 and 3 ms.
    # What rank 0 gets comes from rank 1; the combine goes out when rank 0 is ready for it too.
    assert text_of(busy, Lane.COMM)[:2] == ["comm 6-12 L1.c0.F.dispatch", "comm 21-23 L1.c0.F.combine"]
    assert text_of(idle, Lane.COMM)[:2] == ["comm 6-8 L1.c0.F.dispatch", "comm 11-27 L1.c0.F.combine"]
    assert [span.num_bytes for span in busy.spans if span.lane is Lane.COMM][:2] == [128_000, 384_000]
    assert simulation.prediction.exposed_ms == pytest.approx(idle.exposed_ms())


def test_collectives_run_one_after_the_other():
    """Whoever comes last starts one, and the largest part is what it takes."""
    machine = dataclasses.replace(BY_HAND, shares=(0.75, 0.25), sends_share_link=False)
    _, idle = simulate(synthetic_profile(machine), fixed_plan(1, DwPolicy.NONE)).timelines
    assert text_of(idle, Lane.COMM)[:2] == ["comm 6-12 L1.c0.F.dispatch", "comm 15-27 L1.c0.F.combine"]


def test_compute_during_a_message_is_slower():
    machine = dataclasses.replace(BY_HAND, compute_slowdown=2.0)
    (timeline,) = simulate(synthetic_profile(machine), fixed_plan(2, DwPolicy.NONE)).timelines
    # 2 ms of work while the message travels from 3 to 5: one of them is done by then.
    assert "compute 3-6 L1.c1.F.attention" in text_of(timeline, Lane.COMPUTE)


def _of_fast_rank(host_polls: bool, compute_slowdown: float) -> RankTimeline:
    """Rank 1 gets fewer rows, so it launches its combines before rank 0 does."""
    machine = dataclasses.replace(BY_HAND, shares=(0.75, 0.25), compute_slowdown=compute_slowdown)
    profile = synthetic_profile(machine)
    profile = dataclasses.replace(profile, link=dataclasses.replace(profile.link, host_polls=host_polls))
    return simulate(profile, fixed_plan(2, DwPolicy.NONE)).timelines[1]


def test_waiting_messages_slow_compute_only_on_cuda():
    """Copies cost a CPU time while bytes move; a kernel on CUDA occupies the device from its launch on."""
    alone, on_cpu, on_cuda = (
        sum(span.ms for span in _of_fast_rank(polls, slowdown).spans if span.lane is Lane.COMPUTE)
        for polls, slowdown in ((True, 1.0), (True, 2.0), (False, 2.0))
    )
    assert alone < on_cpu < on_cuda


def test_compute_that_turns_out_to_be_beside_a_message_is_slower():
    """Until the last rank has launched it, a message has no times: compute is delayed afterwards, without a gap."""
    spans = [span for span in _of_fast_rank(True, 2.0).spans if span.lane is not Lane.COMM]
    for before, after in pairwise(sorted(spans, key=lambda span: span.start_ms)):
        assert before.end_ms == pytest.approx(after.start_ms)


def test_ops_that_move_rows_have_a_slowdown_of_their_own():
    profile = synthetic_profile(dataclasses.replace(BY_HAND, link_ms=8.0, compute_slowdown=1.25))
    profile = dataclasses.replace(profile, link=dataclasses.replace(profile.link, memory_slowdown=2.0))
    (timeline,) = simulate(profile, fixed_plan(2, DwPolicy.NONE)).timelines
    # The message of chunk 0 travels from 3 to 7.
    assert text_of(timeline, Lane.COMPUTE)[3:6] == [
        "compute 3-5.5 L1.c1.F.attention",
        "compute 5.5-6.5 L1.c1.F.route",
        "compute 6.5-7.25 L1.c1.F.preprocess",
    ]
    assert profile_from_json(profile.to_json(), "p.json") == profile


def test_slowdown_of_a_profile_without_two_is_that_of_all_ops():
    link = synthetic_profile(dataclasses.replace(BY_HAND, compute_slowdown=1.25)).link
    assert {link.slowdown(kind) for kind in (OpKind.EXPERTS, OpKind.PREPROCESS, "mlp.linear_fc1")} == {1.25}


def test_planned_dws_run_first_in_their_gap():
    # The combine takes no time, so that dWs of the layer above are left for the last gap.
    profile = synthetic_profile(Machine(layers="mm", link_ms=1.0, latency_ms=0.0))
    profile = dataclasses.replace(profile, model=dataclasses.replace(profile.model, combine_row_bytes=0))
    plan = dataclasses.replace(fixed_plan(1), dw_window=8)
    gap = Gap("L1.c0.I.dispatch", ("L1.W.mlp.experts",))
    waits = {
        planned: next(wait for wait in simulation.waits[0] if wait.name == gap.op)
        for planned in (False, True)
        for simulation in [simulate(profile, dataclasses.replace(plan, gaps=(gap,) if planned else ()))]
    }
    assert waits[True].filled == ("L1.W.mlp.experts",)
    assert waits[False].filled == ("L2.W.mlp.experts",)


def test_full_store_runs_the_oldest_dws_early():
    machine = Machine(layers="mm", pinned_bytes=1000, link_ms=0.0, latency_ms=0.0)
    plan = dataclasses.replace(fixed_plan(1, dw_memory_bytes=1000), dw_window=8)
    prediction = simulate(synthetic_profile(machine), plan).prediction
    assert prediction.peak_dw_bytes <= 1000
    assert prediction.num_early > 0


def test_pipeline_step_is_that_of_its_slowest_stage():
    machine = Machine(layers="mmm", stages=(0, 0, 1), num_micro_batches=4)
    layers = Plan((Segment(1, 2, 1), Segment(3, None, 1)), DwPolicy.NONE)
    simulation = simulate(synthetic_profile(machine), layers)
    stage_ms = 2 * (2 * (11.5 + 10) + 9) + 2 * 0.5
    assert simulation.stage == 0
    assert simulation.prediction.step_ms == pytest.approx((4 + 2 - 1) * stage_ms + 1)
    # The first stage has two micro-batches in flight.
    assert simulation.prediction.peak_bytes == 2 * 2 * 10_000_000
    with pytest.raises(PlanMismatch, match="layers 1 to 3 are one segment"):
        simulate(synthetic_profile(machine), fixed_plan(1))


@pytest.mark.parametrize(("num_micro_batches", "num_kept"), [(1, (2, 2)), (2, (4, 3)), (4, (5, 3)), (8, (5, 3))])
def test_virtual_stages_keep_what_megatron_runs_ahead(num_micro_batches, num_kept):
    """Two pairs of virtual stages, each of one layer: the first rank is 2 + 2 + 1 forwards ahead, the second 2 + 1."""
    machine = Machine(layers="mmmm", stages=(0, 1, 0, 1), num_micro_batches=num_micro_batches)
    plan = Plan((*(Segment(number, number, 1) for number in (1, 2, 3)), Segment(4, None, 1)), DwPolicy.NONE)
    stages = Simulator(CostModel(synthetic_profile(machine))).stages(plan)
    assert tuple(stage.saved_bytes for stage in stages) == tuple(10_000_000 * number for number in num_kept)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (Plan((Segment(1, 1, 1),), DwPolicy.NONE), "ends at layer 1, the model has 2"),
        (Plan((Segment(1, 3, 1),), DwPolicy.NONE), "has a layer 3"),
        (fixed_plan(9), "into 9 chunks along batch"),
        (fixed_plan(4, chunk_multiple=4), "into 4 chunks along batch, multiples of 4; the profile's micro-batch has 8"),
    ],
)
def test_simulator_refuses_a_plan_for_another_model(plan, message):
    with pytest.raises(PlanMismatch, match=message):
        simulate(synthetic_profile(Machine()), plan)


def test_simulator_cuts_as_the_segment_says():
    """16 samples in fours: the first of three chunks takes twice as long as the others."""
    profile = synthetic_profile(Machine(layers="m", micro_batch_size=16, shares=(1.0,)))
    segment = Segment(1, None, 3, chunk_multiple=4)
    steps = Simulator(CostModel(profile)).lowering.forward([(1, LayerKind.MOE)], segment)
    rows_ms = [action.forward_ms[0] for _, _, action in steps if action.kind == OpKind.EXPERTS]
    assert segment.chunk_sizes(16) == [8, 4, 4]
    assert rows_ms == pytest.approx([6.0 * size / 16 + 0.1 for size in (8, 4, 4)])


def test_simulator_refuses_shares_of_another_group_size():
    profile = synthetic_profile(Machine())
    with pytest.raises(RecordError, match="expected 2 shares"):
        simulate(profile, fixed_plan(1), ALONE)
    with pytest.raises(RecordError, match="sum to 1"):
        simulate(profile, fixed_plan(1), (0.0, 0.0))
    skewed = simulate(profile, fixed_plan(1), UNEVEN).prediction
    assert skewed.step_ms > simulate(profile, fixed_plan(1)).prediction.step_ms


def test_narrower_overlap_ranges_hide_less():
    """A narrower range hides less, and its chunks meet at the end of each layer."""
    one_layer, three_layers = (
        [
            simulate(synthetic_profile(machine), fixed_plan(2, DwPolicy.NONE, overlap_range=one)).prediction.exposed_ms
            for one in (OverlapRange.STACK, OverlapRange.GATE, OverlapRange.EXPERTS)
        ]
        for machine in (BY_HAND, dataclasses.replace(BY_HAND, layers="mmm"))
    )
    assert one_layer == sorted(one_layer)
    assert three_layers == pytest.approx([one_layer[0], 3 * one_layer[1], 3 * one_layer[2]])


def comm_spans(queued_factor: float) -> list[str]:
    """Messages of two chunks where one that is behind another takes this many times as long as alone."""
    profile = synthetic_profile(BY_HAND)
    queued = tuple((size, queued_factor * ms) for size, ms in profile.link.all_to_all)
    profile = dataclasses.replace(profile, link=dataclasses.replace(profile.link, queued=queued))
    (timeline,) = simulate(profile, fixed_plan(2, DwPolicy.NONE)).timelines
    return text_of(timeline, Lane.COMM)


def test_latency_counts_once_in_a_row_of_messages():
    assert comm_spans(0.5)[4:6] == ["comm 15-17 L1.c1.I.combine", "comm 15.5-18 L1.c0.I.combine"]


def test_link_speed_after_a_short_idle_time_is_in_between():
    # 2 ms alone, 4 ms after the message before; what it gains by resting it gains as time passes.
    assert comm_spans(2)[:4] == [
        "comm 3-5 L1.c0.F.dispatch",
        "comm 6-9 L1.c1.F.dispatch",
        "comm 9-13 L1.c0.F.combine",
        "comm 12-17 L1.c1.F.combine",
    ]


def test_ranks_wait_in_each_chunk_for_the_rank_with_most_rows():
    profile = synthetic_profile(BY_HAND)
    half = profile.model.num_rows // 2
    rows = [(half * 3 // 4, half // 4), (half // 4, half * 3 // 4)]
    routing = tuple(
        ChunkRouting(1, ChunkDim.BATCH, 2, chunk, sent=(half // 2, half // 2), received=(2 * mine, 2 * theirs))
        for chunk, (mine, theirs) in enumerate(rows)
    )
    first, second = simulate(dataclasses.replace(profile, routing=routing), fixed_plan(2, DwPolicy.NONE)).timelines
    # Half of the rows take 3 ms. One rank gets half as many more, the other half as many less, and then the other way.
    assert "compute 6-10.5 L1.c0.F.experts" in text_of(first, Lane.COMPUTE)
    assert "compute 10.5-12 L1.c1.F.experts" in text_of(first, Lane.COMPUTE)
    assert "compute 6-7.5 L1.c0.F.experts" in text_of(second, Lane.COMPUTE)
    # Rank 1 waits for c0's combine until rank 0 sends it.
    assert any(line.startswith("wait") and "L1.c0.F.combine" in line for line in text_of(second, Lane.WAIT))
    with_shares = simulate(dataclasses.replace(profile, routing=routing), fixed_plan(4, DwPolicy.NONE)).prediction
    assert with_shares == simulate(profile, fixed_plan(4, DwPolicy.NONE)).prediction, "no other chunk count is known"
