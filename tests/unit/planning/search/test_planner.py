import dataclasses
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.synthetic_profile import Machine, synthetic_profile
from megatron_lancet.files.reader import RecordError
from megatron_lancet.planning.search.dw_placement import best_fit_gaps
from megatron_lancet.planning.search.dynamic_program import DwGuess, DynamicProgram
from megatron_lancet.planning.search.planner import make_plan
from megatron_lancet.planning.search.search_space import Exclusion, Limits, SearchSpace
from megatron_lancet.planning.simulation.cost_model import CostModel
from megatron_lancet.planning.simulation.simulator import Simulator, simulate
from megatron_lancet.schedule.ops import Compute, Wait
from megatron_lancet.schedule.plan import ChunkDim, DwPolicy, OverlapRange, Plan, Segment, fixed_plan
from tests.draws import examples
from tests.plan_text import read_plan
from tests.unit.planning.strategies import ALONE, EVEN, machines, machines_and_plans

pytestmark = pytest.mark.slow

SMALL = Limits(
    num_chunks=(1, 2), ranges=(OverlapRange.STACK, OverlapRange.EXPERTS), chunk_dims=(ChunkDim.BATCH,), pairing=(False,)
)
CLOSE_MS = 1e-6


def all_segments(machine, limits):
    """Every way to divide the layers and to run the parts, written down again from the definition of a plan."""
    num_layers = len(machine.layers)
    ways = [(1, ChunkDim.BATCH, OverlapRange.STACK)]
    ways += [(k, *way) for k in limits.num_chunks if k > 1 for way in product(limits.chunk_dims, limits.ranges)]
    for cut_after in product((False, True), repeat=num_layers - 1):
        ends = [*(number for number, is_cut in enumerate(cut_after, 1) if is_cut), num_layers]
        bounds = list(zip([0, *ends], ends, strict=False))
        for chosen in product(ways, repeat=len(bounds)):
            parts = [(start + 1, end, *way) for (start, end), way in zip(bounds, chosen, strict=True)]
            parts[-1] = (parts[-1][0], None, *parts[-1][2:])
            stages = [
                {machine.stages[n] for n in range(start, end)} if machine.stages else {0} for start, end in bounds
            ]
            if all(len(crossed) == 1 for crossed in stages):
                yield tuple(Segment(*part) for part in parts)


def all_plans(profile, machine, limits):
    simulator = Simulator(CostModel(profile))
    for segments in all_segments(machine, limits):
        if DwPolicy.NONE in limits.dw_policies:
            yield Plan(segments, DwPolicy.NONE)
        if DwPolicy.FILL in limits.dw_policies:
            k = max(segment.num_chunks for segment in segments)
            for layers in limits.dw_window_layers:
                plan = Plan(segments, DwPolicy.FILL, 2 * k * layers, limits.dw_memory_bytes)
                yield plan
                gaps = best_fit_gaps(simulator, plan)
                if gaps:
                    yield dataclasses.replace(plan, gaps=gaps)


def test_planner_keeps_the_multiple_of_tokens():
    profile = synthetic_profile(Machine(layers="mm", micro_batch_size=4, seq_length=48, dims=tuple(ChunkDim)))
    profile = dataclasses.replace(profile, model=dataclasses.replace(profile.model, token_multiple=96))
    planned = make_plan(profile)
    # 96 tokens are 2 samples of 48 positions, or 24 positions of 4 samples.
    multiples = {ChunkDim.BATCH: 2, ChunkDim.SEQUENCE: 24}
    cut = [s for one in planned.alternatives for s in one.plan.segments if s.num_chunks > 1]
    assert {(s.num_chunks, s.chunk_dim, s.chunk_multiple) for s in cut} == {(2, dim, m) for dim, m in multiples.items()}
    reason = "a micro-batch has 4 samples of 48 positions, and chunks are multiples of 96 tokens"
    assert Exclusion("chunks=4 dim=batch", reason) in planned.excluded


@examples(20)
@given(machines(max_layers=3, max_stages=2), st.sampled_from([None, 21_500_000, 35_000_000, 1_000_000]))
def test_planner_searches_a_small_space_exhaustively(machine, max_memory_bytes):
    profile = synthetic_profile(machine)
    limits = dataclasses.replace(SMALL, dw_window_layers=(1, 2), max_memory_bytes=max_memory_bytes)
    planned = make_plan(profile, limits)
    assert planned.is_exact
    tried = [(simulate(profile, plan).prediction, plan) for plan in all_plans(profile, machine, limits)]
    assert planned.num_simulated == len(tried)
    fitting = [p.step_ms for p, _ in tried if max_memory_bytes is None or p.peak_bytes <= max_memory_bytes]
    if fitting:
        assert planned.prediction.step_ms == pytest.approx(min(fitting), abs=CLOSE_MS)
        assert planned.warning is None
    else:
        assert planned.prediction.peak_bytes == min(p.peak_bytes for p, _ in tried)
        assert "no plan fits into" in planned.warning
    assert simulate(profile, planned.plan).prediction == planned.prediction
    if fitting:  # of equally fast plans the simplest
        bound = max_memory_bytes or float("inf")
        best_ms = planned.prediction.step_ms + CLOSE_MS / 10
        as_fast = [plan for found, plan in tried if found.peak_bytes <= bound and found.step_ms <= best_ms]
        assert len(planned.plan.segments) == min(len(plan.segments) for plan in as_fast)


@examples(25)
@given(machines(max_layers=4, shares=(EVEN, ALONE)))
def test_dynamic_program_is_exact_without_deferral(machine):
    """Where ranks are alike and dWs run at once, nothing is carried over a segment's end."""
    profile = synthetic_profile(machine)
    limits = dataclasses.replace(SMALL, dw_policies=(DwPolicy.NONE,))
    simulator = Simulator(CostModel(profile))
    program = DynamicProgram(simulator, SearchSpace.of(simulator.costs, limits))
    found_ms = simulator.predict(Plan(program.best_segments(DwGuess.AT_ONCE), DwPolicy.NONE)).step_ms
    best_ms = min(simulator.predict(plan).step_ms for plan in all_plans(profile, machine, limits))
    assert found_ms == pytest.approx(best_ms, abs=CLOSE_MS)


@examples(15)
@given(machines(max_layers=6), st.sampled_from([None, 35_000_000, 60_000_000]))
def test_no_fixed_plan_is_predicted_faster_than_the_planned_one(machine, max_memory_bytes):
    """Also where the space is too large to be searched whole."""
    profile = synthetic_profile(machine)
    simulator = Simulator(CostModel(profile))
    planned = make_plan(profile, Limits(max_memory_bytes=max_memory_bytes), max_exhaustive=0)
    assert not planned.is_exact
    fits = planned.warning is None
    if fits and max_memory_bytes is not None:
        assert planned.prediction.peak_bytes <= max_memory_bytes
    for k, policy, dim, one in product((1, 2, 3, 4), DwPolicy, ChunkDim, OverlapRange):
        if k > machine.micro_batch_size:
            continue
        fixed = simulator.predict(fixed_plan(k, policy, dim, one))
        if max_memory_bytes is None or fixed.peak_bytes <= max_memory_bytes:
            assert fits
            assert planned.prediction.step_ms <= fixed.step_ms + CLOSE_MS


@examples(5)
@given(machines(max_layers=4, max_stages=2))
def test_planner_is_deterministic(machine):
    plans = [make_plan(synthetic_profile(machine), max_exhaustive=0) for _ in range(2)]
    assert plans[0] == plans[1]
    assert plans[0].plan.to_json() == plans[1].plan.to_json()
    assert read_plan(plans[0].plan.to_json()) == plans[0].plan


def test_planner_chooses_one_chunk_where_chunks_cost_more():
    machine = Machine(layers="mm", link_ms=0.2, latency_ms=0.1, overhead_ms=5.0, dw_ms={})
    planned = make_plan(synthetic_profile(machine))
    assert planned.plan == fixed_plan(1, DwPolicy.NONE)
    assert planned.no_overlap == planned.prediction


def test_planner_chooses_chunks_where_they_hide_all_to_alls():
    planned = make_plan(synthetic_profile(Machine(layers="m" * 12)), max_exhaustive=0)
    assert planned.plan.num_chunks > 1
    assert planned.prediction.step_ms < 0.8 * planned.no_overlap.step_ms
    assert planned.alternatives[0].plan == planned.plan
    ranks = [alternative.rank() for alternative in planned.alternatives]
    assert ranks == sorted(ranks)


def test_planner_rejects_the_fastest_plan_for_its_memory():
    profile = synthetic_profile(Machine(layers="m" * 12, chunk_counts=(1, 2, 4)))
    free = make_plan(profile, max_exhaustive=0)
    assert free.prediction.peak_bytes > 12 * 10_500_000
    for bound in (12 * 10_500_000, 12 * 10_000_000):
        planned = make_plan(profile, Limits(max_memory_bytes=bound), max_exhaustive=0)
        assert planned.warning is None
        assert planned.prediction.peak_bytes <= bound
        assert planned.prediction.step_ms > free.prediction.step_ms
    # Between one and two chunks everywhere there are plans with both.
    mixed = make_plan(profile, Limits(max_memory_bytes=12 * 10_500_000), max_exhaustive=0)
    assert mixed.prediction.step_ms < planned.prediction.step_ms


def test_planner_warns_and_takes_smallest_plan_where_none_fits():
    planned = make_plan(synthetic_profile(Machine(layers="m" * 6)), Limits(max_memory_bytes=1), max_exhaustive=0)
    assert planned.plan.num_chunks == 1
    assert planned.prediction.peak_bytes == 6 * 10_000_000
    assert planned.warning.startswith("no plan fits into 1e-06 MB; the smallest")


def test_planner_keeps_and_explains_limits():
    profile = synthetic_profile(Machine(layers="mm", dims=tuple(ChunkDim), micro_batch_size=2, chunk_counts=(1, 2, 4)))
    why = Exclusion("range=gate", "the router needs the full micro-batch")
    limits = Limits(
        num_chunks=(2, 4, 8),
        ranges=(OverlapRange.EXPERTS,),
        dw_policies=(DwPolicy.FILL,),
        excluded=(why,),
        pairing=(False,),
    )
    planned = make_plan(profile, limits)
    for alternative in planned.alternatives:
        assert all(segment.num_chunks in (2, 4) for segment in alternative.plan.segments)
        assert all(segment.range is OverlapRange.EXPERTS for segment in alternative.plan.segments)
        assert alternative.plan.dw_policy is DwPolicy.FILL
    assert planned.no_overlap is None
    assert planned.excluded == (
        why,
        Exclusion("chunks=4 dim=batch", "a micro-batch has 2 samples of 64 positions"),
        Exclusion("chunks=8 dim=batch", "a micro-batch has 2 samples of 64 positions"),
        Exclusion("chunks=8 dim=sequence", "chunks along sequence were profiled up to 4"),
        Exclusion("dispatch=dedup", "a token has one expert (top-1), so no rank gets it twice", is_evident=True),
        Exclusion("dispatch=two-hop", "a token has one expert (top-1), so no node gets it twice", is_evident=True),
    )
    with pytest.raises(RecordError, match="the limits leave no plan: chunks=16"):
        make_plan(profile, Limits(num_chunks=(16,)))
    with pytest.raises(RecordError, match="a memory bound can't be enforced"):
        make_plan(dataclasses.replace(profile, memory=()), Limits(max_memory_bytes=1))


def test_planner_handles_many_different_ranks():
    """They are compared with similar ones made equal; what is said of the result is of the real ones."""
    profile = synthetic_profile(Machine(layers="mmm", shares=tuple((rank + 1) / 36 for rank in range(8))))
    planned = make_plan(profile, SMALL)
    assert planned.plan.num_chunks == 2
    assert planned.prediction == simulate(profile, planned.plan).prediction
    assert planned.no_overlap == simulate(profile, fixed_plan(1, DwPolicy.NONE)).prediction


def test_planned_segments_end_with_their_stage():
    machine = Machine(layers="mdmdmd", stages=(0, 0, 0, 1, 1, 1), num_micro_batches=4)
    planned = make_plan(synthetic_profile(machine), max_exhaustive=0)
    assert any(segment.last_layer == 3 for segment in planned.plan.segments)


def test_best_fit_by_hand():
    """Gaps of 8 ms: of 2 and 6 ms the 6 fit best, then the 2; of 3 and 6 ms the 6, then the 3 although 2 are left."""
    machine = Machine(
        layers="mm",
        op_ms={"attention": 1.0, "route": 1.0, "preprocess": 1.0, "experts": 1.0, "postprocess": 1.0},
        dw_ms={"attention": 3.0, "experts": 6.0, "head": 2.0},
        link_ms=8.0,
        latency_ms=0.0,
    )
    profile = synthetic_profile(machine)
    profile = dataclasses.replace(profile, model=dataclasses.replace(profile.model, combine_row_bytes=0))
    plan = Plan(fixed_plan(1).segments, DwPolicy.FILL, dw_window=8)
    gaps = best_fit_gaps(Simulator(CostModel(profile)), plan)
    assert [(gap.op, gap.weight_grads) for gap in gaps] == [
        ("L2.c0.I.dispatch", ("L2.W.mlp.experts", "W.output_layer")),
        ("L1.c0.I.dispatch", ("L1.W.mlp.experts", "L2.W.self_attention.linear_qkv")),
    ]


@given(machines_and_plans(), st.integers(1, 8))
def test_every_dw_is_in_a_gap_where_the_host_does_not_poll(machine_and_plan, window):
    """Each rank runs exactly these in front of these waits; behind a stage's last wait there is no gap any more."""
    machine, plan = machine_and_plan
    profile = synthetic_profile(dataclasses.replace(machine, host_polls=False))
    simulator = Simulator(CostModel(profile))
    plan = Plan(plan.segments, DwPolicy.FILL, window)
    planned = dataclasses.replace(plan, gaps=best_fit_gaps(simulator, plan))
    assert read_plan(planned.to_json()) == planned
    gaps = {gap.op: gap.weight_grads for gap in planned.gaps}
    for stage in simulator.stages(planned):
        verbs = [verb for verb, _, _ in stage.backward]
        last_wait = max((index for index, verb in enumerate(verbs) if verb is Wait), default=0)
        num_put = sum(len(action.weight_grads[0]) for verb, _, action in stage.backward[:last_wait] if verb is Compute)
        for waits in simulator.simulate(planned, stage.number).waits:
            filled = {wait.name: wait.filled for wait in waits if wait.filled}
            assert filled == {wait.name: gaps[wait.name] for wait in waits if wait.name in gaps}
            assert sum(map(len, filled.values())) == num_put


def test_dws_that_fit_no_gap_are_placed_where_host_does_not_poll():
    """Messages take no time, so a polling host would plan nothing: each dW goes into the first gap of its window."""
    machine = Machine(layers="mm", dw_ms={"experts": 6.0, "head": 2.0}, link_ms=0.0, latency_ms=0.0, host_polls=False)
    plan = Plan(fixed_plan(1).segments, DwPolicy.FILL, dw_window=2)
    placed, none = (
        best_fit_gaps(Simulator(CostModel(synthetic_profile(dataclasses.replace(machine, host_polls=polls)))), plan)
        for polls in (False, True)
    )
    assert [(gap.op, gap.weight_grads) for gap in placed] == [
        ("L2.c0.I.combine", ("W.output_layer",)),
        ("L2.c0.I.dispatch", ("L2.W.mlp.experts",)),
        ("L1.c0.I.dispatch", ("L1.W.mlp.experts",)),
    ]
    assert none == ()
