"""Which tiles the planner tries, and where it chooses them."""

import argparse
import dataclasses

import pytest

from benchmarks.synthetic_profile import OP_MS, Machine, synthetic_profile
from megatron_lancet.cli.planning import add_limit_arguments, limits_of
from megatron_lancet.features.dedup.order import DEDUP
from megatron_lancet.features.two_hop.order import TWO_HOP
from megatron_lancet.files.reader import RecordError
from megatron_lancet.planning.dispatch import with_dispatch
from megatron_lancet.planning.search.planner import make_plan
from megatron_lancet.planning.search.search_space import Exclusion, Limits
from megatron_lancet.planning.simulation.cost_model import CostModel
from megatron_lancet.planning.simulation.simulator import Simulator
from megatron_lancet.schedule.plan import DwPolicy, LocalTokens, fixed_plan

SHORT_MESSAGES = Machine(layers="mm", link_ms=2.0, overhead_ms=0.2, tiles=2)
"""Chunks cost 0.2 ms for each of their ops, and hide messages of 2 ms; tiles cost it for each part of the experts."""
WITHOUT_DWS = Limits(dw_policies=(DwPolicy.NONE,))


def numbers_of_tiles(planned):
    return {segment.tiles for one in planned.alternatives for segment in one.plan.segments}


def test_planner_tries_tiles_where_plan_with_tiles_was_profiled():
    profile = synthetic_profile(SHORT_MESSAGES)
    planned = make_plan(profile, WITHOUT_DWS)
    assert planned.plan.has_tiles
    assert {0, 1} <= numbers_of_tiles(planned) <= {0, 1, 2, 4}
    assert all(s.num_chunks == 1 for one in planned.alternatives for s in one.plan.segments if s.tiles)
    assert planned.no_overlap is not None
    assert planned.prediction.step_ms < planned.no_overlap.step_ms
    before = dataclasses.replace(profile, ops=tuple(op for op in profile.ops if not op.tiles))
    assert numbers_of_tiles(make_plan(before, WITHOUT_DWS)) == {0}
    # Experts on fewer rows also have a price there, so tiles that are asked for can be compared.
    assert numbers_of_tiles(make_plan(before, dataclasses.replace(WITHOUT_DWS, tiles=(0, 2)))) == {0, 2}


def test_planner_takes_no_tiles_where_parts_cost_more():
    machine = dataclasses.replace(SHORT_MESSAGES, link_ms=0.3)
    assert not make_plan(synthetic_profile(machine), WITHOUT_DWS).plan.has_tiles


def test_tiles_asked_for_are_in_every_plan_and_in_chunks():
    profile = synthetic_profile(dataclasses.replace(SHORT_MESSAGES, tiles=0))
    limits = Limits(tiles=(2,), num_chunks=(1, 2))
    planned = make_plan(profile, limits)
    segments = [segment for one in planned.alternatives for segment in one.plan.segments]
    assert {(segment.tiles, segment.local_tokens) for segment in segments} == {
        (2, LocalTokens.HALF),
        (2, LocalTokens.AFTER),
        (2, LocalTokens.TILED),
    }
    assert {segment.num_chunks for segment in segments} == {1, 2}
    windows = {one.plan.dw_window for one in planned.alternatives if len(one.plan.segments) == 1}
    assert {2 * 2 * layers for layers in (1, 2, 4)} <= windows
    with pytest.raises(RecordError, match="two-hop: its messages have no tiles"):
        make_plan(profile, dataclasses.replace(limits, dispatches=(TWO_HOP,)))


def test_plans_with_tiles_are_paired_only_if_tiles_are_asked_for():
    profile = synthetic_profile(dataclasses.replace(SHORT_MESSAGES, num_micro_batches=3, chunk_counts=(1,)))
    for tiles, expected in ((None, {False}), ((1,), {True})):
        planned = make_plan(profile, dataclasses.replace(WITHOUT_DWS, tiles=tiles))
        paired = [one.plan for one in planned.alternatives if one.plan.is_paired]
        assert {plan.has_tiles for plan in paired} == expected


def test_one_rank_has_no_tiles():
    profile = synthetic_profile(Machine(layers="m", shares=(1.0,)))
    planned = make_plan(profile, Limits(tiles=(0, 1), num_chunks=(1,)))
    assert Exclusion("tiles", "there is one expert-parallel rank, so nothing is sent") in planned.excluded
    assert numbers_of_tiles(planned) == {0}


def test_tiles_add_few_plans_to_a_large_search():
    machine = dataclasses.replace(SHORT_MESSAGES, layers="dm" * 6, chunk_counts=(1, 2))
    limits = Limits(pairing=(False,), dw_window_layers=(1,))
    without, tiled = (
        make_plan(synthetic_profile(dataclasses.replace(machine, tiles=tiles)), limits) for tiles in (0, 2)
    )
    assert not tiled.is_exact
    # Eight ways with a dW option each and one with gaps, and a proposal for each guess.
    assert tiled.num_simulated - without.num_simulated <= 8 * 2 + 8 + 3
    assert tiled.prediction.step_ms <= without.prediction.step_ms
    simulator = Simulator(CostModel(synthetic_profile(dataclasses.replace(machine, tiles=2))))
    for tiles in (1, 2, 4):
        for local_tokens in LocalTokens:
            plan = fixed_plan(1, tiles=tiles, local_tokens=local_tokens)
            assert tiled.prediction.step_ms <= simulator.predict(plan).step_ms


def test_two_hops_are_compared_without_tiles():
    machine = Machine(
        layers="mm",
        op_ms=OP_MS,
        shares=(0.25,) * 4,
        num_nodes=2,
        topk=2,
        link_ms=8.0,
        between_nodes=0.4,
        inside_node=0.05,
        tiles=2,
        chunk_counts=(1, 2),
    )
    planned = make_plan(synthetic_profile(machine), dataclasses.replace(WITHOUT_DWS, pairing=(False,)))
    assert planned.plan.dispatch is TWO_HOP
    assert numbers_of_tiles(planned) == {0}


def test_plan_in_two_hops_has_no_tiles_and_as_long_a_window():
    plan = fixed_plan(2, tiles=3, local_tokens=LocalTokens.AFTER)
    assert with_dispatch(plan, TWO_HOP) == fixed_plan(2, dispatch=TWO_HOP)
    assert with_dispatch(plan, DEDUP) == dataclasses.replace(plan, dispatch=DEDUP)


def test_tools_take_numbers_of_tiles():
    parser = argparse.ArgumentParser()
    add_limit_arguments(parser)
    limits = limits_of(parser.parse_args(["--tiles", "0", "2"]))
    assert limits.tiles == (0, 2)
    assert limits_of(parser.parse_args([])) == Limits()
    with pytest.raises(SystemExit):
        parser.parse_args(["--tiles", "-1"])
