"""Expert-parallel sizes: what each costs, which is chosen, and what is refused."""

import dataclasses

import pytest

from benchmarks.synthetic_profile import Machine, synthetic_profile
from megatron_lancet.errors import UsageError
from megatron_lancet.lab.what_if.expert_packing import StateMemory, expert_parallel_sizes, pack_experts
from megatron_lancet.lab.what_if.forecast import Forecaster, NetworkChoice
from megatron_lancet.planning.search.gradient_overlap import measured_with, with_reduction
from megatron_lancet.planning.search.planner import make_plan
from megatron_lancet.planning.search.search_space import Limits
from megatron_lancet.planning.simulation.simulator import simulate
from megatron_lancet.schedule.plan import ChunkDim, Dispatch, DwPolicy, OverlapRange, fixed_plan
from megatron_lancet.schedule.reductions import GradientReduction

MB = 1_000_000
EVEN4 = (0.25,) * 4
# 6 ms of experts; a rank has 512 rows of 1000 bytes.
MACHINE = Machine("mm", shares=EVEN4, latency_ms=0.0, link_ms=1.0, rest_ms=0.0, overhead_ms=0.0)


def two_chunks(profile, room_bytes):
    return fixed_plan(2, DwPolicy.NONE)


def profile_of(machine=MACHINE, **changes):
    profile = synthetic_profile(machine)
    return dataclasses.replace(profile, model=dataclasses.replace(profile.model, **{"num_experts": 8, **changes}))


def packed(gbps, profile=None, planner=two_chunks, **options):
    return pack_experts(Forecaster(profile or profile_of(), NetworkChoice(4, gbps, 0.0)), planner, **options)


def test_packing_times_equal_those_by_hand():
    choice = packed(0.512)  # 64 bytes a us: 256 rows of a chunk would take 4 ms if all of them left
    assert [one.layout.ep_size for one in choice.packings] == [4, 2, 1]
    assert [one.experts_per_rank for one in choice.packings] == [2, 4, 8]
    assert [one.expert_replicas for one in choice.packings] == [1, 2, 4]
    assert [one.num_chunks for one in choice.packings] == [2, 2, 1]
    assert [one.experts_ms for one in choice.packings] == pytest.approx([3, 3, 6])
    assert [one.all_to_all_ms for one in choice.packings] == pytest.approx([3, 2, 0])
    # Three gradients of 1 MB stay dense; two layers' experts of 1 MB become 2 and 4 MB. A ring of n passes 2 (n-1)/n.
    per_mb = 1000 / 64
    expected = [1.5 * 3 * per_mb, (1.5 * 3 + 1 * 2 * 2) * per_mb, 1.5 * (3 + 2 * 4) * per_mb]
    assert [one.forecast.gradient_ms for one in choice.packings] == pytest.approx(expected)
    # Weight, gradient and two moments, and 10 or 11 MB of activations of each layer.
    assert [one.state_bytes for one in choice.packings] == pytest.approx([20 * MB, 28 * MB, 44 * MB])
    assert [one.peak_bytes for one in choice.packings] == pytest.approx([42 * MB, 50 * MB, 64 * MB])


def test_packing_sends_distinct_rows_if_the_plan_does():
    """Of 8 experts top-4, a token has one on each of 2 ranks in 69 of 70 cases, on each of 4 ranks in 55 of 70."""

    def planner(profile, room_bytes):
        return dataclasses.replace(two_chunks(profile, room_bytes), dispatch=Dispatch.DEDUP)

    choice = packed(0.512, profile_of(dataclasses.replace(MACHINE, topk=4)), planner)
    # Probabilities and choice of 2 experts fit into 16 bytes beside 1008 of the token, those of 4 into 32.
    sent_bytes = [256 * 3 * 55 / 70 * 1024, 256 * 69 / 70 * 1040, 0]
    assert [one.all_to_all_ms for one in choice.packings] == pytest.approx([size / 64_000 for size in sent_bytes])


def test_experts_are_packed_until_they_cover_an_all_to_all():
    assert packed(0.513).fewest_experts.layout.ep_size == 4
    assert packed(0.511).fewest_experts.layout.ep_size == 2
    assert packed(0.3).fewest_experts.layout.ep_size == 1


def test_fastest_packing_size_counts_all_costs():
    """Many micro-batches send rows often and gradients once; few of them the other way round."""
    often = packed(0.1, profile_of(num_micro_batches=64))
    assert often.fastest.layout.ep_size == 1
    once = packed(0.1, profile_of(num_micro_batches=1))
    assert once.fastest.layout.ep_size == 4
    for choice in (often, once):
        steps_ms = [one.forecast.step_ms for one in choice.packings]
        assert choice.fastest.forecast.step_ms == min(steps_ms)


def test_packing_of_the_profiled_size_equals_the_simulator():
    profile = profile_of()
    choice = pack_experts(Forecaster(profile, NetworkChoice()), two_chunks)
    assert choice.packings[0].forecast.step_ms == pytest.approx(
        simulate(profile, two_chunks(None, None)).prediction.step_ms
    )


def test_packing_does_not_choose_what_does_not_fit_in_memory():
    choice = packed(0.1, profile_of(num_micro_batches=64), limit_bytes=51 * MB)
    assert [one.fits for one in choice.packings] == [True, True, False]
    assert choice.fastest.layout.ep_size == choice.fewest_experts.layout.ep_size == 2
    divided = packed(0.1, profile_of(num_micro_batches=64), limit_bytes=51 * MB, memory=StateMemory(True))
    # Moments of 11 MB are divided among 4 ranks: 2 * 11 + 2 * 11 / 4, and 20 of activations.
    assert divided.packings[-1].peak_bytes == pytest.approx(47.5 * MB)
    assert divided.fastest.layout.ep_size == 1
    with pytest.raises(UsageError, match=r"fits into 41 MB: the smallest, EP 4, takes about 42 MB"):
        packed(0.1, limit_bytes=41 * MB)


def test_packing_plans_keep_within_memory_beside_weights():
    rooms = {}

    def planner(profile, room_bytes):
        rooms[profile.model.ep_size] = room_bytes
        return two_chunks(profile, room_bytes)

    packed(0.1, planner=planner, limit_bytes=60 * MB)
    assert rooms == {4: 40 * MB, 2: 32 * MB}


def test_packing_sizes_divide_experts_and_ranks():
    facts = profile_of(Machine("mm", stages=(0, 1), shares=EVEN4), world_size=24, num_experts=12).model
    assert expert_parallel_sizes(facts, 24) == [12, 6, 4, 3, 2, 1]
    assert expert_parallel_sizes(facts, 16) == [4, 2, 1]
    with pytest.raises(UsageError, match="no multiple of 2 pipeline stages"):
        expert_parallel_sizes(facts, 9)
    dense = dataclasses.replace(facts, layer_kinds=profile_of(Machine("dd")).model.layer_kinds)
    with pytest.raises(UsageError, match="no experts"):
        expert_parallel_sizes(dense, 24)


def overlapped(reduce_ms=4.0, machine=MACHINE, **changes):
    """A profile whose all-reduce of 1 MB over 4 ranks takes ``reduce_ms``, and how it is reduced."""
    profile = profile_of(dataclasses.replace(machine, rest_ms=50.0))
    link = dataclasses.replace(profile.link, all_reduce=((0, 0.0), (MB, reduce_ms)))
    return dataclasses.replace(profile, link=link), GradientReduction(4, **{"bucket_bytes": MB, **changes})


def test_packing_counts_only_reductions_not_hidden_by_the_backward():
    profile, rules = overlapped()
    beside = with_reduction(profile, rules)
    assert beside.rest_ms == pytest.approx(50 - 3 * 4)
    assert with_reduction(beside, None) == profile
    assert with_reduction(beside, rules) == beside
    plan = fixed_plan(2)
    expected = simulate(dataclasses.replace(profile, gradients=rules), plan).prediction
    measured = measured_with(profile, rules, [plan])
    assert measured.rest_ms == pytest.approx(50 - expected.gradient_ms)
    assert simulate(measured, plan).prediction.step_ms == pytest.approx(expected.step_ms - expected.gradient_ms)


def test_packing_predicts_reductions_during_the_backward():
    profile, rules = overlapped(reduce_ms=15.0)
    after = packed(0.512, profile)
    beside = packed(0.512, with_reduction(profile, rules))
    for one, other in zip(beside.packings, after.packings, strict=True):
        assert 0 < one.forecast.gradient_ms < other.forecast.gradient_ms
        assert one.forecast.step_ms < other.forecast.step_ms
    moved = Forecaster(with_reduction(profile, rules), NetworkChoice(4, 0.512, 0.0))
    at_one = moved.moved(moved.layout(4, 1))
    assert (at_one.gradients.dense_ranks, at_one.gradients.expert_ranks) == (4, 4)
    assert at_one.link.all_reduce[-1][1] == pytest.approx(1.5 * at_one.link.all_reduce[-1][0] / 64_000)
    assert moved.moved(moved.layout(8, 4)).gradients.expert_ranks == 2


def test_packing_plans_are_chosen_with_reductions_on_the_link():
    """What wins without them need not win with them; the winner's figures are those of the whole simulation."""
    machine = dataclasses.replace(MACHINE, layers="mmm", link_ms=6.0, chunk_counts=(1, 2))
    profile, rules = overlapped(reduce_ms=8.0, machine=machine)
    beside = with_reduction(profile, rules)
    limits = Limits(ranges=(OverlapRange.STACK, OverlapRange.EXPERTS), chunk_dims=(ChunkDim.BATCH,))
    planned = make_plan(beside, limits)
    assert planned.prediction == simulate(beside, planned.plan).prediction
    assert planned.prediction.gradient_ms > 0
    assert planned.no_overlap is not None
    assert planned.prediction.step_ms <= simulate(beside, make_plan(profile, limits).plan).prediction.step_ms
    assert make_plan(beside, limits) == planned
