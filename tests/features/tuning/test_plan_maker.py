"""From a profile to a plan on rank 0: what is measured, what is kept, and what happens when something is missing."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from megatron_lancet.config import AttentionChoice
from megatron_lancet.features.dedup.order import DEDUP
from megatron_lancet.features.tuning import plan_maker
from megatron_lancet.features.tuning.controller import PlanningFailed
from megatron_lancet.features.tuning.memory_bound import memory_bound_bytes
from megatron_lancet.features.tuning.plan_maker import ProfilingPlanMaker
from megatron_lancet.features.tuning.race import Candidate, with_kernel
from megatron_lancet.files.reader import RecordError
from megatron_lancet.planning.search.finalists import CLOSE_PART, NUM_FINALISTS, kind_of
from megatron_lancet.planning.simulation.cost_model import CostModel
from megatron_lancet.planning.simulation.simulator import Simulator
from megatron_lancet.profiler.cache import ProfileKey, names_of
from megatron_lancet.schedule.dispatch import PLAIN, Dispatch
from megatron_lancet.schedule.nodes import Nodes
from megatron_lancet.schedule.plan import ChunkDim, DwPolicy, fixed_plan, paired, plan_without_overlap
from megatron_lancet.schedule.reductions import GradientReduction
from tests.features.tuning.fake_profile_runs import BATCH, FEW, MACHINE, PRESENT, PROFILE, Run, best, profiled

pytestmark = pytest.mark.slow


def test_plan_maker_returns_plans_of_several_kinds(make):
    maker = make()
    assert maker.num_steps() == 12  # 1, 2 and 4 chunks
    planned, num_steps = profiled(maker)
    assert num_steps == 3
    assert best(planned).num_chunks > 1
    kinds = [kind_of(candidate.plan) for candidate in planned.finalists]
    assert 1 < len(kinds) == len(set(kinds)) <= NUM_FINALISTS
    predicted_ms = [candidate.prediction.step_ms for candidate in planned.finalists]
    assert max(predicted_ms) < sum(op.ms for op in PROFILE.ops)
    assert planned.why.endswith("s from a profile of 3 steps")
    assert maker.made_for()["ep_size"] == "2"
    assert maker.notes == []


def test_profile_and_race_have_the_attention_kernel(make, monkeypatch):
    """With two kernels in one race, a plan of chunks along the sequence would win by its kernel alone."""
    fastest = with_kernel(fixed_plan(2))
    monkeypatch.setattr(Run, "result", replace(PROFILE, measured_steps_ms={str(fastest): 1.0}))
    maker = make(replace(BATCH, chunk_dims=tuple(ChunkDim)), attention=AttentionChoice.AUTO)
    planned, _ = profiled(maker)
    assert str(planned.kernel) == "no overlap, fused attention"
    assert planned.kernel.plan == replace(plan_without_overlap(), fused_attention=True)
    along_sequence = [fixed_plan(k, chunk_dim=ChunkDim.SEQUENCE) for k in (2, 4)]
    assert Run.started[-1][0] == [*(with_kernel(fixed_plan(k)) for k in (1, 2, 4)), *along_sequence]
    raced = [candidate.plan for candidate in (*planned.finalists, *planned.others)]
    assert raced == list(map(with_kernel, raced))
    profiled(maker, again=True)
    assert Run.started[-1][0] == [with_kernel(PRESENT)]


def test_model_without_the_kernel_is_profiled_without_it(make):
    maker = make(attention=AttentionChoice.AUTO)
    maker.begin(again=False)
    maker.drop("the model lacks it")
    assert maker.next_plan() == fixed_plan(1)
    while maker.next_plan() is not None:
        maker.run_step(lambda: None)
    planned = maker.make()
    assert planned.kernel is None
    assert not any(candidate.plan.fused_attention for candidate in planned.finalists)
    assert maker.notes == [f"{with_kernel(fixed_plan(1))} is not profiled: the model lacks it"]
    key = replace(ProfileKey.of(PROFILE), plans=names_of(fixed_plan(k) for k in (1, 2, 4)))
    assert maker._key == key, "a later run finds the profile"


def test_plan_maker_plans_for_pipeline_stages(make, monkeypatch):
    staged = replace(PROFILE, model=replace(PROFILE.model, stage_of_layer=(0, 1)))
    monkeypatch.setattr(Run, "result", staged)
    planned, _ = profiled(make())
    assert planned.no_overlap_ms > PROFILE.rest_ms
    assert all(len(candidate.plan.segments) > 1 for candidate in planned.finalists)


@pytest.mark.parametrize("refreshes", [False, True])
def test_batch_that_grows_is_profiled_anew(make, monkeypatch, refreshes):
    maker = make()
    if refreshes:
        profiled(maker)
    maker.begin(refreshes)
    assert maker.next_plan() is not None
    maker.run_step(lambda: None)
    monkeypatch.setattr(Run, "num_micro_batches", 4)
    num_steps = 0
    while maker.next_plan() is not None:
        maker.run_step(lambda: None)
        num_steps += 1
    assert Run.started[-1] == Run.started[-2]
    assert num_steps == len(Run.started[-1][0]) * Run.started[-1][1]
    assert maker.notes == ["a step has 4 micro-batches now, 2 before: profiling anew"]


@pytest.mark.parametrize("flags", [{"attention": AttentionChoice.STOCK}, {"attention": AttentionChoice.SDPA}])
def test_kernel_is_no_candidate_if_the_user_has_chosen(make, flags):
    assert profiled(make(**flags))[0].kernel is None


def test_plan_maker_measures_links_and_shares_of_a_changed_run(make, monkeypatch):
    maker = make()
    profiled(maker)
    slow = tuple((size, 3 * ms) for size, ms in PROFILE.link.all_to_all)
    changed = replace(PROFILE, ops=(), link=replace(PROFILE.link, all_to_all=slow), received_share=(0.8, 0.2))
    monkeypatch.setattr(Run, "result", changed)
    planned, num_steps = profiled(maker, again=True)
    assert Run.started[-1] == ([PRESENT], 2)
    assert num_steps == 2
    assert maker.profile == replace(PROFILE, link=changed.link, received_share=(0.8, 0.2))
    assert planned.others == (), "it ran under other conditions"


def test_plan_maker_without_deferral_leaves_profiled_plans_out(make):
    planned, _ = profiled(make(replace(FEW, dw_policies=(DwPolicy.NONE,))))
    assert best(planned).dw_policy is DwPolicy.NONE
    assert planned.others == ()


def test_plan_maker_leaves_unpaired_plans_out_on_request(make, monkeypatch):
    """They are what the profile ran by, and contradict the user's wish."""
    monkeypatch.setattr(Run, "result", replace(PROFILE, model=replace(PROFILE.model, num_micro_batches=2)))
    planned, _ = profiled(make(replace(BATCH, pairing=(True,))))
    assert all(candidate.plan.is_paired for candidate in planned.finalists)
    assert planned.others == ()


@pytest.mark.parametrize("dispatch", Dispatch.known().values())
def test_plan_maker_tries_only_allowed_dispatches(make, monkeypatch, dispatch):
    """All but one of the profiled plans have the plain dispatch, and that one has what is allowed."""
    model = replace(PROFILE.model, num_experts=16, topk=4, nodes=Nodes(2, 2), ep_size=4, world_size=4)
    link = replace(PROFILE.link, between_nodes=PROFILE.link.all_to_all, inside_node=PROFILE.link.all_to_all)
    own = fixed_plan(1, dispatch=dispatch)
    known = replace(
        PROFILE,
        model=model,
        received_share=(0.25,) * 4,
        link=link,
        measured_steps_ms={str(fixed_plan(2)): 44.0, str(own): 33.0},
    )
    monkeypatch.setattr(Run, "result", known)
    maker = make(replace(BATCH, dispatches=(dispatch,)))
    assert maker.num_steps() == (12 if dispatch is PLAIN else 16)
    planned, _ = profiled(maker)
    assert best(planned).dispatch is dispatch
    assert [candidate.plan for candidate in planned.others] in ([], [own])


@pytest.mark.parametrize(("share", "said"), [(0.1, True), (0.09, False)])
def test_plan_maker_says_where_launches_limit_a_step(make, monkeypatch, share, said):
    bound = {str(fixed_plan(2)): share, str(fixed_plan(1)): 0.04}
    monkeypatch.setattr(Run, "result", replace(PROFILE, launch_bound=bound))
    maker = make()
    profiled(maker)
    line = (
        f"a step is launch-bound for 4% of its time ({fixed_plan(1)}) to {share:.0%} of its time ({fixed_plan(2)}): "
        "fewer chunks, larger micro-batches or CUDA graphs help (docs/gpus.md)"
    )
    assert maker.notes == ([line] if said else [])


def test_race_has_a_second_dispatch(make, monkeypatch):
    """The prediction of one dispatch may be wrong for all plans, and nothing else would show it."""
    model = replace(PROFILE.model, num_experts=16, topk=2, ep_size=4, world_size=4)
    known = replace(PROFILE, model=model, received_share=(0.25,) * 4, measured_steps_ms={})
    monkeypatch.setattr(Run, "result", known)
    dispatches = (PLAIN, DEDUP)
    planned, _ = profiled(make(replace(BATCH, dispatches=dispatches)))
    (taken,) = {candidate.plan.dispatch for candidate in planned.finalists}
    (other,) = planned.others
    assert other.plan == replace(best(planned), dispatch=dispatches[taken is PLAIN], gaps=())
    assert other.prediction.step_ms <= CLOSE_PART * planned.finalists[0].prediction.step_ms
    assert profiled(make(replace(BATCH, dispatches=(taken,))))[0].others == ()
    with monkeypatch.context() as patch:
        of_profile = Candidate(fixed_plan(1, dispatch=taken))
        patch.setattr(ProfilingPlanMaker, "_fast_profiled", lambda *_: [of_profile])
        full, _ = profiled(make(replace(BATCH, dispatches=dispatches)))
    assert full.others == (of_profile, other)
    assert full.finalists == planned.finalists[: NUM_FINALISTS - 1], "the race stays as long as announced"
    monkeypatch.setattr(Simulator, "predict", lambda *_: SimpleNamespace(peak_bytes=2))
    tight = replace(BATCH, dispatches=dispatches, max_memory_bytes=1)
    assert plan_maker._other_dispatch(planned.finalists, tight, Simulator(CostModel(known))) == []


def test_plan_maker_profiles_tiles_and_tries_allowed_ones(make, monkeypatch):
    tiled = fixed_plan(1, tiles=2)
    known = replace(PROFILE, measured_steps_ms={**PROFILE.measured_steps_ms, str(tiled): 33.0})
    monkeypatch.setattr(Run, "result", known)
    for tiles in (None, (2,), (4,)):
        maker = make(replace(BATCH, tiles=tiles))
        assert maker.num_steps() == 16
        planned = profiled(maker)[0]
        raced = [candidate.plan for candidate in (*planned.finalists, *planned.others)]
        if tiles == (4,):
            assert {plan.segments[0].tiles for plan in raced} == {4}
        else:
            assert kind_of(tiled) in map(kind_of, raced)


def test_plan_maker_measures_a_paired_run_unpaired(make, monkeypatch):
    maker = make()
    profiled(maker)
    maker._setup.plan = paired(fixed_plan(1), fixed_plan(2))
    monkeypatch.setattr(Run, "result", replace(PROFILE, model=replace(PROFILE.model, num_micro_batches=7)))
    maker.begin(again=True)
    assert maker.next_plan() == fixed_plan(1)
    while maker.next_plan() is not None:
        maker._setup.plan = maker.next_plan()  # as the run switches
        maker.run_step(lambda: None)
    maker.make()
    assert maker.profile.model.num_micro_batches == 7, "the batch has grown"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RecordError("no times"), "no plan could be made: no times"),
        (ZeroDivisionError("division by zero"), "planning failed: ZeroDivisionError: division by zero"),
    ],
)
def test_plan_maker_reports_a_failing_planner(make, monkeypatch, error, said):
    def fail(*_):
        raise error

    monkeypatch.setattr(plan_maker, "make_plan", fail)
    with pytest.raises(PlanningFailed, match=f"^{said}$"):
        profiled(make())


def test_plan_maker_rejects_a_plan_that_exceeds_the_memory_bound(make, monkeypatch):
    """What ran fitted. Everything faster that keeps more than that and the room left is out of the question."""
    alone = fixed_plan(1, DwPolicy.NONE)
    monkeypatch.setattr(plan_maker, "plans_within", lambda *_: [alone])

    def planned(room_bytes: int):
        monkeypatch.setattr(Run, "room_bytes", room_bytes)
        maker = make()
        maker._setup.plan = alone
        return profiled(maker)[0]

    free, tight = planned(1 << 40), planned(0)
    simulator = Simulator(CostModel(PROFILE))
    most_bytes = simulator.predict(alone).peak_bytes
    assert simulator.predict(best(free)).peak_bytes > most_bytes
    assert all(simulator.predict(candidate.plan).peak_bytes <= most_bytes for candidate in tight.finalists)
    assert tight.finalists[0].prediction.step_ms > free.finalists[0].prediction.step_ms


@pytest.mark.parametrize("again", [False, True])
def test_memory_bound_leaves_out_steps_before_the_profile(make, monkeypatch, again):
    """A GPU's warm-up may have stock's attention, whose peak the profile does not predict."""
    calls = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: calls.append("reset"))
    monkeypatch.setattr(plan_maker, "least_room_bytes", lambda device: calls.append("room") or 1 << 40)
    monkeypatch.setattr(
        plan_maker, "memory_bound_bytes", lambda profile, ran, room: calls.append([*dict.fromkeys(ran)]) or 1 << 40
    )
    maker = make()
    if again:
        profiled(maker)
        maker._setup.plan = paired(fixed_plan(1), fixed_plan(2))
    calls.clear()
    maker._device = torch.device("cuda", 0)
    profiled(maker, again=again)
    assert calls == ["reset", "room", [fixed_plan(1)] if again else [fixed_plan(k) for k in (1, 2, 4)]]


def test_memory_bound_is_used_memory_and_most_of_the_free_memory():
    ran = [fixed_plan(1, DwPolicy.NONE), fixed_plan(2), fixed_plan(5, chunk_dim=ChunkDim.SEQUENCE)]
    simulator = Simulator(CostModel(PROFILE))
    most = max(simulator.predict(plan).peak_bytes for plan in ran[:2])
    assert memory_bound_bytes(PROFILE, ran, 1000) == most + 900
    assert memory_bound_bytes(replace(PROFILE, memory=()), ran, 1000) is None


OVERLAPPED = GradientReduction(dense_ranks=2, bucket_bytes=1_000_000)


def test_refused_plans_are_left_out_of_the_profile(make, monkeypatch):
    link = replace(PROFILE.link, all_reduce=((0, 0.0), (1_000_000, 4.0)))
    monkeypatch.setattr(Run, "result", replace(PROFILE, link=link))  # without chunks of a sequence
    monkeypatch.setattr(plan_maker, "reduction_of", lambda *_: OVERLAPPED)
    maker = make(replace(BATCH, chunk_dims=tuple(ChunkDim)))
    maker.begin(again=False)
    ran = []
    while (plan := maker.next_plan()) is not None:
        if plan.segments[0].chunk_dim is ChunkDim.SEQUENCE:
            maker.drop("no such kernel")
        else:
            maker.run_step(lambda: None)
            ran.append(plan)
    assert [plan.num_chunks for plan in ran] == [1, 2, 4]
    assert maker.notes == [
        f"{fixed_plan(k, chunk_dim=ChunkDim.SEQUENCE)} is not profiled: no such kernel" for k in (2, 4)
    ]
    assert all(segment.chunk_dim is ChunkDim.BATCH for segment in best(maker.make()).segments)


def test_plan_maker_plans_with_reductions_during_the_backward(make, monkeypatch, tmp_path):
    link = replace(PROFILE.link, all_reduce=((0, 0.0), (1_000_000, 4.0)))
    measured = replace(PROFILE, link=link, rest_ms=20.0)
    monkeypatch.setattr(Run, "result", measured)
    monkeypatch.setattr(plan_maker, "reduction_of", lambda *_: OVERLAPPED)
    maker = make(cache_dir=tmp_path)
    planned, _ = profiled(maker)
    # What the simulator adds to a step leaves the rest, where it was measured as a part of it.
    assert maker.profile.gradients == OVERLAPPED
    assert 0 < maker.profile.rest_ms < 20
    assert Simulator(CostModel(maker.profile)).predict(best(planned)).gradient_ms > 0
    # A later run that reduces them afterwards finds the profile, and waits for all of them.
    monkeypatch.setattr(plan_maker, "reduction_of", lambda *_: None)
    monkeypatch.setattr(plan_maker, "MISFIT_SHARE", 100.0)
    monkeypatch.setattr(Run, "result", replace(measured, measured_steps_ms={str(PRESENT): 44.0}))
    later = make(cache_dir=tmp_path)
    assert later.num_steps() == 3
    profiled(later)
    assert later.profile.gradients is None
    num_weights = len(MACHINE.layers) + 1  # experts have no other rank to be summed with
    assert later.profile.rest_ms == pytest.approx(maker.profile.rest_ms + 4 * num_weights)
