"""From a profile to a plan on rank 0: what is measured, what is kept, and what happens when something is missing."""

from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from benchmarks.synthetic_profile import Machine, synthetic_profile
from megatron_lancet.config import CacheChoice
from megatron_lancet.files import RecordError
from megatron_lancet.planning.search.search_space import Limits
from megatron_lancet.planning.simulation.cost_model import CostModel
from megatron_lancet.planning.simulation.simulator import Simulator
from megatron_lancet.profiler.cache import ProfileKey
from megatron_lancet.schedule.dispatch import PLAIN, Dispatch
from megatron_lancet.schedule.nodes import Nodes
from megatron_lancet.schedule.plan import ChunkDim, DwPolicy, OverlapRange, fixed_plan, paired
from megatron_lancet.schedule.reductions import GradientReduction
from megatron_lancet.training.tuning import plan_maker
from megatron_lancet.training.tuning.controller import PlanningFailed
from megatron_lancet.training.tuning.memory_budget import memory_bound_bytes
from megatron_lancet.training.tuning.plan_maker import ProfilingPlanMaker
from tests.unit.training.configs import config_with

pytestmark = pytest.mark.slow

MACHINE = Machine()
PROFILE = replace(synthetic_profile(MACHINE), measured_steps_ms={str(fixed_plan(2)): 44.0, "another": 1.0})
PRESENT = fixed_plan(4)
FEW = Limits(chunk_dims=(ChunkDim.BATCH,), ranges=(OverlapRange.STACK,), dw_window_layers=(1,))
"""The planner's own tests search larger spaces."""
BATCH = replace(FEW, dispatches=(PLAIN,), tiles=(0,))


class Run:
    """A profile run whose result is known."""

    result = PROFILE
    room_bytes = 1 << 40
    started: list = []

    def __init__(self, model, plans, num_traced_steps=1) -> None:
        Run.started.append((list(plans), num_traced_steps))
        self.plans = [plan for plan in plans for _ in range(num_traced_steps)]

    @contextmanager
    def step(self, index):
        yield

    def finish(self):
        return self.result


@pytest.fixture
def make(monkeypatch):
    """A plan maker of a run with one rank; what it said is its ``notes``."""
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "broadcast_object_list", lambda objects, src: None)
    monkeypatch.setattr(plan_maker, "ProfileRun", Run)
    monkeypatch.setattr(plan_maker, "least_room_bytes", lambda device: Run.room_bytes)
    monkeypatch.setattr(Run, "room_bytes", 1 << 40)
    monkeypatch.setattr(plan_maker, "profiled_model", lambda *_: "model")
    monkeypatch.setattr(plan_maker, "key_of", lambda model: ProfileKey.of(PROFILE))
    monkeypatch.setattr(Run, "started", [])
    monkeypatch.setattr(Run, "result", PROFILE)

    def build(limits=BATCH, cache_dir=None):
        monkeypatch.setattr(plan_maker, "planning_limits", lambda args, config: limits)
        args = SimpleNamespace(
            micro_batch_size=MACHINE.micro_batch_size,
            seq_length=MACHINE.seq_length,
            context_parallel_size=1,
            overlap_grad_reduce=False,
            fp8=None,
            fp4=None,
        )
        notes: list[str] = []
        setup = SimpleNamespace(plan=PRESENT)
        config = config_with(cache=cache_dir or CacheChoice.OFF)
        maker = ProfilingPlanMaker(args, config, setup, torch.device("cpu"), notes.append)
        maker.made_for()
        maker.notes = notes
        return maker

    return build


def profiled(maker, again: bool = False):
    maker.begin(again)
    num_steps = 0
    while maker.next_plan() is not None:
        assert maker.run_step(lambda: "result") == "result"
        num_steps += 1
    return maker.make(), num_steps


def test_plan_maker_returns_a_plan_and_the_profiled_plans(make):
    maker = make()
    assert maker.num_steps() == 12  # 1, 2 and 4 chunks
    planned, num_steps = profiled(maker)
    assert num_steps == 3
    assert planned.plan.num_chunks > 1
    assert planned.prediction.step_ms < sum(op.ms for op in PROFILE.ops)
    assert planned.why.endswith("s from a profile of 3 steps")
    assert planned.profiled == {str(fixed_plan(2)): (fixed_plan(2), 44.0)}
    assert maker.made_for()["ep_size"] == "2"
    assert maker.notes == []


def test_plan_maker_with_a_kept_profile_needs_no_steps(make, tmp_path):
    first, _ = profiled(make(cache_dir=tmp_path / "cache"))
    again = make(cache_dir=tmp_path / "cache")
    assert again.num_steps() == 0
    planned, num_steps = profiled(again)
    assert (planned.plan, num_steps) == (first.plan, 0)
    assert f"from the profile {tmp_path / 'cache' / 'profile-'}" in planned.why


def test_damaged_or_unwritable_profile_cache_is_one_line(make, tmp_path):
    folder = tmp_path / "cache"
    profiled(make(cache_dir=folder))
    next(folder.iterdir()).write_text("{")
    maker = make(cache_dir=folder)
    assert profiled(maker)[1] == 3
    assert [note.split(":")[0] for note in maker.notes] == ["the profile in the cache can't be used"]

    maker = make(cache_dir=next(folder.iterdir()) / "below-a-file")
    assert profiled(maker)[1] == 3
    (note,) = maker.notes
    assert note.startswith("the profile is not kept for later runs: ")
    assert note.endswith("--lancet-cache names another folder, or off")


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
    assert planned.profiled == {}, "it ran under other conditions"


def test_plan_maker_without_deferral_leaves_profiled_plans_out(make):
    planned, _ = profiled(make(replace(FEW, dw_policies=(DwPolicy.NONE,))))
    assert planned.plan.dw_policy is DwPolicy.NONE
    assert planned.profiled == {}


def test_plan_maker_leaves_unpaired_plans_out_on_request(make, monkeypatch):
    """They are what the profile ran by, and contradict the user's wish."""
    monkeypatch.setattr(Run, "result", replace(PROFILE, model=replace(PROFILE.model, num_micro_batches=2)))
    planned, _ = profiled(make(replace(BATCH, pairing=(True,))))
    assert planned.plan.is_paired
    assert planned.profiled == {}


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
        measured_steps_ms={**PROFILE.measured_steps_ms, str(own): 55.0},
    )
    monkeypatch.setattr(Run, "result", known)
    maker = make(replace(BATCH, dispatches=(dispatch,)))
    assert maker.num_steps() == (12 if dispatch is PLAIN else 16)
    planned, _ = profiled(maker)
    assert planned.plan.dispatch is dispatch
    plain = {str(fixed_plan(2)): (fixed_plan(2), 44.0)} if dispatch is PLAIN else {}
    assert planned.profiled == {str(own): (own, 55.0), **plain}


def test_plan_maker_profiles_tiles_and_tries_allowed_ones(make, monkeypatch):
    tiled = fixed_plan(1, tiles=2)
    known = replace(PROFILE, measured_steps_ms={**PROFILE.measured_steps_ms, str(tiled): 33.0})
    monkeypatch.setattr(Run, "result", known)
    tried = {}
    for tiles in (None, (2,), (4,)):
        maker = make(replace(BATCH, tiles=tiles))
        assert maker.num_steps() == 16
        tried[tiles] = set(profiled(maker)[0].profiled)
    assert tried == {None: {str(tiled), str(fixed_plan(2))}, (2,): {str(tiled)}, (4,): set()}


def test_plan_maker_measures_a_paired_run_unpaired(make, monkeypatch):
    maker = make()
    profiled(maker)
    maker._setup.plan = present = paired(fixed_plan(1), fixed_plan(2))
    bounded_by = []
    monkeypatch.setattr(plan_maker, "memory_bound_bytes", lambda profile, ran, room: bounded_by.append(ran) or 1 << 40)
    monkeypatch.setattr(Run, "result", replace(PROFILE, model=replace(PROFILE.model, num_micro_batches=7)))
    maker.begin(again=True)
    assert maker.next_plan() == fixed_plan(1)
    while maker.next_plan() is not None:
        maker._setup.plan = maker.next_plan()  # as the run switches
        maker.run_step(lambda: None)
    maker.make()
    assert bounded_by[0][0] == present
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
    assert simulator.predict(free.plan).peak_bytes > most_bytes
    assert simulator.predict(tight.plan).peak_bytes <= most_bytes
    assert tight.prediction.step_ms > free.prediction.step_ms


def test_memory_bound_is_used_memory_and_most_of_the_free_memory():
    ran = [fixed_plan(1, DwPolicy.NONE), fixed_plan(2), fixed_plan(5, chunk_dim=ChunkDim.SEQUENCE)]
    simulator = Simulator(CostModel(PROFILE))
    most = max(simulator.predict(plan).peak_bytes for plan in ran[:2])
    assert memory_bound_bytes(PROFILE, ran, 1000) == most + 900
    assert memory_bound_bytes(replace(PROFILE, memory=()), ran, 1000) is None


OVERLAPPED = GradientReduction(dense_ranks=2, bucket_bytes=1_000_000)


def test_plan_maker_plans_with_reductions_during_the_backward(make, monkeypatch, tmp_path):
    link = replace(PROFILE.link, all_reduce=((0, 0.0), (1_000_000, 4.0)))
    measured = replace(PROFILE, link=link, rest_ms=20.0)
    monkeypatch.setattr(Run, "result", measured)
    monkeypatch.setattr(plan_maker, "reduction_of", lambda *_: OVERLAPPED)
    maker = make(cache_dir=tmp_path)
    profiled(maker)
    # What the simulator adds to a step leaves the rest, where it was measured as a part of it.
    assert maker.profile.gradients == OVERLAPPED
    assert 0 < maker.profile.rest_ms < 20
    assert maker.planned.prediction.gradient_ms > 0
    # A later run that reduces them afterwards finds the profile, and waits for all of them.
    monkeypatch.setattr(plan_maker, "reduction_of", lambda *_: None)
    later = make(cache_dir=tmp_path)
    assert later.num_steps() == 0
    profiled(later)
    assert later.profile.gradients is None
    num_weights = len(MACHINE.layers) + 1  # experts have no other rank to be summed with
    assert later.profile.rest_ms == pytest.approx(maker.profile.rest_ms + 4 * num_weights)
