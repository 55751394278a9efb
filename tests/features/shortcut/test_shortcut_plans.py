"""Routed sums that are added one layer later: runs and plans that can have them, refusals, and the planner's choice."""

import argparse
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.synthetic_profile import DW_MS, OP_MS, Machine, synthetic_profile
from megatron_lancet.config import PlanChoice
from megatron_lancet.errors import UsageError
from megatron_lancet.features.shortcut.feature import FLAG, ShortcutFlags, check_checkpoint
from megatron_lancet.features.shortcut.order import NAME
from megatron_lancet.features.shortcut.support import layers_blocker, plan_blocker
from megatron_lancet.features.tuning.profile_steps import plans_within
from megatron_lancet.planning.profile import Profile, profile_from_json
from megatron_lancet.planning.search.planner import make_plan
from megatron_lancet.planning.search.search_space import Limits
from megatron_lancet.planning.simulation.simulator import simulate
from megatron_lancet.schedule.layers import LayerKind
from megatron_lancet.schedule.ops import Launch, OpKind, Wait
from megatron_lancet.schedule.plan import DwPolicy, OverlapRange, Plan, Segment, fixed_plan, paired
from megatron_lancet.schedule.turns import program, verbs_of
from megatron_lancet.training.plan.limits import planning_limits
from megatron_lancet.training.plan.select import choose_plan
from megatron_lancet.training.run import check_features, facts_of_run
from tests.unit.training.configs import config_with
from tests.unit.training.validated import parsed

MOE, DENSE = LayerKind.MOE, LayerKind.DENSE
PAIRS = ["--num-layers", 4, "--moe-layer-freq", "([1,0]*2)", "--moe-shared-expert-intermediate-size", 64]
PAIRS += ["--hidden-size", 32, "--num-attention-heads", 4]


def profile_of(wiring: str = NAME, **machine: Any) -> Profile:
    """Of two pairs of layers, in which a message takes as long as the ops beside it."""
    op_ms = {**OP_MS, OpKind.SHARED_EXPERTS: 2.0}
    found = synthetic_profile(Machine("mdmd", op_ms=op_ms, dw_ms={**DW_MS, OpKind.SHARED_EXPERTS: 2.0}, **machine))
    return replace(found, model=replace(found.model, wiring=wiring))


@pytest.mark.parametrize("flags", [["--moe-input-jitter-eps", 0.01], ["--moe-router-force-load-balancing"]])
def test_routing_of_full_micro_batches_profiles_one_chunk(monkeypatch, flags):
    """Its chunks could only be of experts, which the sums of a later layer do not allow."""
    args, config = parsed(monkeypatch, FLAG, *PAIRS, *flags), config_with(ShortcutFlags(shortcut_moe=True))
    limits = planning_limits(args, config)
    assert limits.ranges == ()
    assert {plan.num_chunks for plan in plans_within(args, config, limits)} == {1}


def test_ops_of_a_pair_are_those_of_its_layers():
    """In another order, and with the residual of the shared experts by itself."""
    layers = [(number, verbs_of(kind, has_shared_experts=True)) for number, kind in enumerate([MOE, DENSE] * 2, 1)]
    plain, late = (list(program(layers, 1, OverlapRange.STACK, wiring)) for wiring in ("", NAME))
    added = [one for one in late if one not in plain]
    assert [str(one) for one in added] == [f"add residual in L{layer}.c0.F.shared_experts" for layer in (1, 3)]
    assert sorted(map(str, plain)) == sorted(str(one) for one in late if one not in added)


@pytest.mark.parametrize(
    ("message", "beside"),
    [("dispatch", ["L1.c0.F.shared_experts", "L2.c0.F.attention"]), ("combine", ["L2.c0.F.mlp"])],
)
def test_layers_run_while_rows_are_under_way(message, beside):
    layers = [(1, verbs_of(MOE, has_shared_experts=True)), (2, verbs_of(DENSE, has_shared_experts=True))]
    run = list(program(layers, 1, OverlapRange.STACK, NAME))
    start, end = ([type(one.verb) for one in run if one.verb.kind == message].index(verb) for verb in (Launch, Wait))
    own = [index for index, one in enumerate(run) if one.verb.kind == message]
    between = {str(one.op) for one in run[own[start] + 1 : own[end]]}
    assert between == set(beside)


def test_unknown_wiring_is_refused():
    with pytest.raises(UsageError, match="has no loops"):
        program([], 1, OverlapRange.STACK, "loops")


def test_messages_are_hidden_with_one_chunk():
    """Forward and backward, where a message takes no longer than the ops beside it; in stock's wiring it is exposed."""
    late, plain = (simulate(profile_of(wiring), fixed_plan(1, DwPolicy.NONE)).prediction for wiring in (NAME, ""))
    assert plain.exposed_ms > 0.15 * plain.step_ms
    assert late.exposed_ms == 0


def test_planner_cuts_nothing_where_one_chunk_hides_all():
    planned = make_plan(profile_of())
    assert planned.plan.num_chunks == 1
    assert len(planned.plan.segments) == 1
    assert planned.is_exact
    assert all(plan_blocker(one.plan) is None for one in planned.alternatives)
    assert {one.plan.num_chunks for one in planned.alternatives} > {1}


def test_planner_cuts_where_one_chunk_does_not_hide_all():
    planned = make_plan(profile_of(link_ms=40.0))
    assert planned.plan.num_chunks > 1
    assert plan_blocker(planned.plan) is None


def test_planner_without_allowed_ranges_cuts_nothing():
    assert make_plan(profile_of(link_ms=40.0), Limits(ranges=(OverlapRange.GATE,))).plan.num_chunks == 1


def test_profile_keeps_the_wiring():
    for wiring in (NAME, ""):
        profile = profile_of(wiring)
        assert ("wiring" in profile.to_json()) == bool(wiring)
        assert profile_from_json(profile.to_json(), "") == profile


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (fixed_plan(1, tiles=2), "in tiles"),
        (fixed_plan(2, overlap_range=OverlapRange.GATE), "range=gate"),
        (paired(fixed_plan(1), fixed_plan(2, overlap_range=OverlapRange.EXPERTS)), "range=experts"),
        (Plan((Segment(1, 1, 1), Segment(2, None, 2)), dw_window=2), "begins at layer 2"),
    ],
)
def test_plans_that_part_layers_are_blocked(plan, reason):
    assert reason in plan_blocker(plan)


@pytest.mark.parametrize(
    "plan", [fixed_plan(1), fixed_plan(2), Plan((Segment(1, 2, 1), Segment(3, None, 2)), dw_window=2)]
)
def test_plans_of_whole_pairs_are_allowed(plan):
    assert plan_blocker(plan) is None


@pytest.mark.parametrize("kinds", [[], [MOE], [DENSE, MOE], [MOE, MOE], [MOE, DENSE, MOE]])
def test_other_patterns_are_blocked(kinds):
    assert layers_blocker([MOE, DENSE] * 3) is None
    assert layers_blocker(kinds).startswith("expected MoE and dense layers in turn, MoE first, found")


def chosen(args, **settings):
    """The plan of a run with the flag, checked."""
    config = config_with(shortcut_moe=True, **settings)
    plan, _ = choose_plan(args, config)
    check_features(facts_of_run(args, config, plan, None))
    return plan


def test_fixed_plan_has_one_chunk_unless_the_user_says_otherwise(monkeypatch):
    args = parsed(monkeypatch, *PAIRS)
    assert chosen(args).num_chunks == 1
    assert chosen(args).dw_window == 2
    assert chosen(args, num_chunks=2).num_chunks == 2


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["--moe-layer-freq", 1], "found moe, moe"),
        (["--mtp-num-layers", 1], "--mtp-num-layers yet"),
        (["--fp32-residual-connection"], "--fp32-residual-connection yet"),
        (["--moe-shared-expert-intermediate-size", 0], "expected shared experts"),
        (["--dataloader-inter-document-masking"], "--dataloader-inter-document-masking yet"),
    ],
)
def test_other_models_are_refused(monkeypatch, words, found):
    with pytest.raises(UsageError, match=found):
        chosen(parsed(monkeypatch, *PAIRS, *words))


@pytest.mark.parametrize("stock", [["--expert-model-parallel-size", 1], {"plan": PlanChoice.OFF}], ids=["EP 1", "off"])
def test_identity_experts_need_the_all_to_all_dispatcher(monkeypatch, stock):
    """Stock modules run Megatron's own dispatcher, whose default is another one."""
    words, settings = (stock, {}) if isinstance(stock, list) else ([], stock)
    assert chosen(parsed(monkeypatch, *PAIRS, *words), identity_experts=2, **settings) is None
    other = parsed(monkeypatch, *PAIRS, *words, "--moe-token-dispatcher-type", "allgather")
    assert chosen(other, **settings) is None
    with pytest.raises(UsageError, match=r"type allgather yet\. Pass --moe-token-dispatcher-type alltoall"):
        chosen(other, identity_experts=2, **settings)


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"num_chunks": 2, "range": OverlapRange.GATE}, "put together in front of the next layer"),
        ({"tiles": 2}, "runs the next layer while rows are under way"),
    ],
)
def test_settings_that_part_layers_are_refused(monkeypatch, settings, found):
    with pytest.raises(UsageError, match=found):
        chosen(parsed(monkeypatch, *PAIRS), **settings)


def test_checkpoints_of_the_other_wiring_are_refused():
    def of(is_wired: bool, finetune: bool = False) -> argparse.Namespace:
        return argparse.Namespace(lancet_shortcut_moe=is_wired, finetune=finetune)

    for is_wired in (False, True):
        check_checkpoint(of(is_wired), of(is_wired))
        check_checkpoint(of(is_wired, finetune=True), of(not is_wired))
        with pytest.raises(UsageError, match=f"{'without' if is_wired else 'with'} {FLAG}"):
            check_checkpoint(of(is_wired), of(not is_wired))
    check_checkpoint(of(False), argparse.Namespace())  # of another version
