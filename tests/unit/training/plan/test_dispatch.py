"""``--lancet-dispatch`` and Megatron's ``flex``: which runs may have which dispatch, and the lines that say why not."""

import json
from dataclasses import replace

import pytest
import torch

from megatron_lancet.config import LancetConfig, PlanChoice
from megatron_lancet.errors import UsageError
from megatron_lancet.features.dedup.order import DEDUP
from megatron_lancet.features.pairing.feature import PairingChoice
from megatron_lancet.features.tuning.feature import is_tuned
from megatron_lancet.features.two_hop.feature import nodes_to_connect, unknown_nodes_note
from megatron_lancet.features.two_hop.order import TWO_HOP
from megatron_lancet.files.records import to_plain
from megatron_lancet.plan_words import plan_text
from megatron_lancet.planning.plan_file import PlanFile, write_plan_file
from megatron_lancet.schedule.dispatch import PLAIN, Dispatch
from megatron_lancet.schedule.nodes import Nodes
from megatron_lancet.schedule.plan import ChunkDim, DwPolicy, fixed_plan, paired
from megatron_lancet.training.plan.flag_mapping import map_overlap_flags
from megatron_lancet.training.plan.limits import planning_limits
from megatron_lancet.training.plan.select import choose_plan
from megatron_lancet.training.run_hook import RunHook
from tests.unit.training.configs import changed, config_with, cut_with
from tests.unit.training.validated import parsed

CPU = torch.device("cpu")
WITH_PLAIN, WITH_DEDUP = config_with(dispatch=PLAIN), config_with(dispatch=DEDUP)
FLEX = ["--moe-token-dispatcher-type", "flex", "--moe-enable-deepep"]
MAPPED = "--moe-token-dispatcher-type flex runs as the plan's all-to-alls"
NAME, HOPS = "dispatch=dedup", "dispatch=two-hop"
ON_NODES = config_with(ranks_per_node=2)
WITH_TWO_HOP = replace(ON_NODES, dispatch=TWO_HOP)
EP4 = ["--expert-model-parallel-size", 4]
TE = ["--transformer-impl", "transformer_engine"]


def deduplicated(*settings, **more):
    """A fixed plan that deduplicates."""
    return fixed_plan(*settings, **more, dispatch=DEDUP)


@pytest.fixture
def megatron_args(monkeypatch):
    """Megatron's arguments for a run on 8 ranks that can deduplicate: 2 of 8 experts for each token, on 2 ranks.

    Nothing tells which ranks share a node.
    """
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)

    def make(*changes: object, config: LancetConfig | None = None):
        args = parsed(monkeypatch, "--num-layers=8", "--moe-router-topk=2", *changes)
        args.world_size = 8
        args.lancet_test_line = map_overlap_flags(args, config or config_with())
        return args

    return make


POSSIBLE = {
    "plain model": [],
    "full recompute": ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", 1],
    "expert tensor": ["--tensor-model-parallel-size", 2, "--sequence-parallel", "--expert-tensor-parallel-size", 2],
    "dropped tokens": ["--moe-expert-capacity-factor", 1.5],
    "shared experts": ["--moe-shared-expert-intermediate-size", 16],
    "multi-token prediction": ["--mtp-num-layers", 1],
    "fp8": [*TE, "--fp8-format", "hybrid"],
    "hybrid": ["--hybrid-layer-pattern", "*E*E*E*E"],
    "one sample": ["--micro-batch-size", 1],
    "top-8 of 16": ["--moe-router-topk", 8, "--num-experts", 16],
}


@pytest.mark.parametrize("changes", POSSIBLE.values(), ids=POSSIBLE.keys())
def test_planner_chooses_and_fixed_plans_are_plain_unless_asked(megatron_args, changes):
    args = megatron_args(*changes)
    assert planning_limits(args, config_with()).dispatches == (PLAIN, DEDUP)
    assert planning_limits(args, WITH_PLAIN).dispatches == (PLAIN,)
    assert planning_limits(args, WITH_DEDUP).dispatches == (DEDUP,)
    plain, line = choose_plan(args, config_with())
    assert plain == choose_plan(args, WITH_PLAIN)[0]
    assert plain.dispatch is PLAIN
    assert "dispatch=" not in line
    plan, line = choose_plan(args, WITH_DEDUP)
    assert plan == replace(plain, dispatch=DEDUP)  # as many messages
    assert plan.is_paired
    assert line.startswith(plan_text(plan))
    assert f"({str(plain).removesuffix(' paired')} dispatch=dedup paired)" in line
    both = config_with(dispatch=DEDUP, pairing=PairingChoice.ON, num_chunks=1)
    assert choose_plan(args, both)[0].at_ends.dispatch is DEDUP


@pytest.mark.parametrize("changes", POSSIBLE.values(), ids=POSSIBLE.keys())
def test_two_hops_are_allowed_where_groups_are_on_several_nodes(megatron_args, changes):
    args = megatron_args(*EP4, *changes)
    on_nodes = changed(ON_NODES, ranks_per_node=2 * args.expert_tensor_parallel_size)
    limits = planning_limits(args, on_nodes)
    assert limits.dispatches == tuple(Dispatch.known().values())
    assert all(one.what not in (NAME, HOPS) for one in limits.excluded)
    asked = changed(on_nodes, dispatch=TWO_HOP, pairing=PairingChoice.OFF)
    assert planning_limits(args, asked).dispatches == (TWO_HOP,)
    assert choose_plan(args, on_nodes)[0].dispatch is PLAIN
    plan, line = choose_plan(args, asked)
    (segment,) = plan.segments
    multiple = segment.chunk_multiple
    assert plan == fixed_plan(
        segment.num_chunks, DwPolicy.FILL, segment.chunk_dim, segment.range, None, multiple, TWO_HOP
    )
    assert line.startswith(f"{plan_text(plan)}; two hops over 2 nodes x 2 ranks")
    assert "dispatch=two-hop" in line
    paired_plan, _ = choose_plan(args, changed(asked, pairing=PairingChoice.ON, num_chunks=1))
    assert paired_plan.at_ends.dw_window == 4


def test_two_hops_with_one_expert_on_each_rank(megatron_args):
    """A node has several experts, so a token may be sent there twice, but never to one rank."""
    for flags in ([], FLEX):
        args = megatron_args(*EP4, "--num-experts", 4, *flags, config=ON_NODES)
        limits = planning_limits(args, ON_NODES)
        assert limits.dispatches == (PLAIN, TWO_HOP)
        assert [one.what for one in limits.excluded if one.what in (NAME, HOPS)] == [NAME]
        expected = TWO_HOP if flags else PLAIN
        assert choose_plan(args, ON_NODES)[0] == paired(fixed_plan(1, dispatch=expected))
    assert args.lancet_test_line == f"{MAPPED}, one row per token and node"


DROP = "Drop the flag, or pass --lancet-dispatch plain."
PASS = "Pass --lancet-ranks-per-node N, the number of ranks that are started on each node, or "
NO_HOPS = {
    "unknown nodes": ([], None, "it is not known which ranks share a node", True, False),
    "inside a node": (
        [],
        8,
        "an expert-parallel group has 4 ranks, and a node has 8, so nothing leaves a node",
        True,
        False,
    ),
    "nodes not filled": (
        ["--expert-model-parallel-size", 2, "--num-experts", 6],
        3,
        "an expert-parallel group has 2 ranks, which do not fill nodes of 3",
        True,
        True,
    ),
    "one rank a node": ([], 1, "a node has one rank, so no node gets a token for several of its ranks", True, False),
    "top-1": (["--moe-router-topk", 1], 2, "a token has one expert (top-1), so no node gets it twice", False, False),
    "padded capacity": (
        ["--moe-expert-capacity-factor", 1.5, "--moe-pad-expert-input-to-capacity"],
        2,
        "experts' inputs are padded to capacity, and padded rows belong to no rank's tokens",
        False,
        True,
    ),
}


@pytest.mark.parametrize(
    ("changes", "per_node", "reason", "depends_on_nodes", "is_told"), NO_HOPS.values(), ids=NO_HOPS.keys()
)
def test_two_hops_are_excluded_and_refused_if_asked_for(
    megatron_args, tmp_path, changes, per_node, reason, depends_on_nodes, is_told
):
    args = megatron_args(*EP4, *changes)
    args.world_size = 24
    config = config_with(ranks_per_node=per_node)
    limits = planning_limits(args, config)
    assert TWO_HOP not in limits.dispatches
    excluded = [one.reason for one in limits.excluded if one.what == HOPS]
    assert len(excluded) == is_told
    assert all(told.startswith(reason) for told in excluded)
    note = unknown_nodes_note(args, config)
    expected = f"not {HOPS}: {reason} (--lancet-ranks-per-node sets it)" if per_node is None else None
    assert note == expected

    with pytest.raises(UsageError) as refusal:
        choose_plan(args, replace(config, dispatch=TWO_HOP))
    advice = PASS + DROP[0].lower() + DROP[1:] if depends_on_nodes else DROP
    assert str(refusal.value) == f"--lancet-dispatch two-hop is not possible: {reason}. {advice}"
    path = tmp_path / "plan.json"
    write_plan_file(path, PlanFile(fixed_plan(1, dispatch=TWO_HOP), None))
    with pytest.raises(UsageError) as refusal:
        choose_plan(args, replace(config, plan=path))
    advice = f"{PASS}make a plan for this run." if depends_on_nodes else "Make a plan for this run."
    told = f"--lancet-plan {path} dispatches in two hops, which is not possible here: {reason}. {advice}"
    assert str(refusal.value) == told


def test_ranks_per_node_that_do_not_divide_ranks_are_refused(megatron_args):
    told = r"^--lancet-ranks-per-node 3 does not divide the 8 ranks of the run: .*, or drop the flag\.$"
    for changes, plan in (([], PlanChoice.AUTO), ([], PlanChoice.OFF), (["--expert-model-parallel-size", 1], "auto")):
        with pytest.raises(UsageError, match=told):
            choose_plan(megatron_args(*changes), config_with(plan=PlanChoice(plan), ranks_per_node=3))


def test_run_connects_nodes_if_a_plan_of_it_may_have_two_hops(megatron_args, tmp_path):
    args, nodes = megatron_args(*EP4), Nodes(2, 2)
    args.train_iters = 1000
    path = tmp_path / "plan.json"
    write_plan_file(path, PlanFile(fixed_plan(2, dispatch=TWO_HOP), None))
    cases = {
        "a plan with them": (nodes, {"dispatch": TWO_HOP, "num_chunks": 2}),
        "a plan file with them": (nodes, {"plan": path}),
        "found while it runs": (nodes, {}),
        "for a profile": (nodes, {"profile": tmp_path / "profile.json"}),
        "a plan without": (None, {"num_chunks": 2}),
        "found among others": (None, {"dispatch": DEDUP}),
        "a profile for others": (None, {"profile": tmp_path / "profile.json", "dispatch": PLAIN}),
        "no plan": (None, {"plan": PlanChoice.OFF}),
    }
    for name, (expected, changes) in cases.items():
        assert _connected(args, changed(ON_NODES, **changes)) == expected, name
    assert _connected(args, config_with()) is None


def _connected(args, config):
    """The nodes that a run with this plan connects."""
    facts = RunHook().choose(args, config, CPU)
    if facts.plan is None:
        return None
    return nodes_to_connect(args, config, facts.plan, facts.plan_changes)


IMPOSSIBLE = {
    "top-1": (["--moe-router-topk", 1], "a token has one expert"),
    "padded capacity": (
        ["--moe-expert-capacity-factor", 1.5, "--moe-pad-expert-input-to-capacity"],
        "experts' inputs are padded to capacity",
    ),
    "one local expert": (["--num-experts", 2], "a rank has one expert"),
}


@pytest.mark.parametrize(("changes", "reason"), IMPOSSIBLE.values(), ids=IMPOSSIBLE.keys())
def test_dedup_is_excluded_with_reason_and_refused_if_asked_for(megatron_args, tmp_path, changes, reason):
    args = megatron_args(*changes)
    for config in (config_with(), WITH_PLAIN):
        assert planning_limits(args, config).dispatches == (PLAIN,)
        plan, line = choose_plan(args, config)
        assert plan.dispatch is PLAIN
        assert "dispatch=" not in line  # the user has not asked for it
    excluded = [one.reason for one in planning_limits(args, config_with()).excluded if one.what == NAME]
    assert excluded[0].startswith(reason)
    assert all(one.what != NAME for one in planning_limits(args, WITH_PLAIN).excluded)
    for config in (WITH_DEDUP, replace(WITH_DEDUP, num_chunks=2)):
        with pytest.raises(UsageError) as refusal:
            choose_plan(args, config)
        assert str(refusal.value).startswith(f"--lancet-dispatch dedup is not possible: {reason}")
        assert str(refusal.value).endswith(". Drop the flag, or pass --lancet-dispatch plain.")
        assert "\n" not in str(refusal.value)

    path = tmp_path / "plan.json"
    write_plan_file(path, PlanFile(deduplicated(1), None))
    with pytest.raises(UsageError) as refusal:
        choose_plan(args, config_with(plan=path))
    told = f"--lancet-plan {path} deduplicates dispatched rows, which is not possible here: {reason}"
    assert str(refusal.value).startswith(told)
    assert str(refusal.value).endswith(". Make a plan for this run.")


def test_dedup_needs_a_plan_and_expert_parallelism(megatron_args):
    with pytest.raises(UsageError, match=r"--lancet-dispatch dedup needs the overlapping block, but --lancet-plan off"):
        choose_plan(megatron_args(), replace(WITH_DEDUP, plan=PlanChoice.OFF))
    with pytest.raises(UsageError, match=r"--lancet-dispatch dedup is about .* --expert-model-parallel-size is 1\. Dr"):
        choose_plan(megatron_args("--expert-model-parallel-size", 1), WITH_DEDUP)
    with pytest.raises(UsageError, match=r"--lancet-dispatch two-hop needs the overlapping block, but --lancet-plan"):
        choose_plan(megatron_args(), replace(WITH_TWO_HOP, plan=PlanChoice.OFF))
    with pytest.raises(
        UsageError, match=r"--lancet-dispatch two-hop is about .* --expert-model-parallel-size is 1\. D"
    ):
        choose_plan(megatron_args("--expert-model-parallel-size", 1), WITH_TWO_HOP)
    for config in (WITH_PLAIN, replace(WITH_PLAIN, plan=PlanChoice.OFF)):
        assert choose_plan(megatron_args("--expert-model-parallel-size", 1), config)[0] is None


def test_plan_file_says_what_is_dispatched_and_contradicts_flag(megatron_args, tmp_path):
    path = tmp_path / "plan.json"
    write_plan_file(path, PlanFile(paired(deduplicated(2)), None))
    args = megatron_args(*FLEX, config=config_with(plan=path))
    assert args.lancet_test_line == MAPPED
    plan, line = choose_plan(args, config_with(plan=path))
    assert plan == paired(deduplicated(2))
    assert "dispatch=dedup" in line
    for value in Dispatch.known().values():
        with pytest.raises(UsageError, match=f"--lancet-dispatch {value} contradicts --lancet-plan"):
            choose_plan(args, config_with(plan=path, dispatch=value))
    write_plan_file(path, PlanFile(fixed_plan(2), None))
    assert choose_plan(args, config_with(plan=path))[0] == fixed_plan(2)


def test_flex_deduplicates_fixed_and_tuned_plans(megatron_args):
    args = megatron_args(*FLEX)
    assert args.lancet_test_line == f"{MAPPED}, one row per token and rank"
    assert choose_plan(args, config_with())[0] == paired(deduplicated(1))
    assert choose_plan(args, cut_with())[0] == deduplicated(2)
    assert choose_plan(args, config_with(num_chunks=4))[0] == deduplicated(4)
    assert planning_limits(args, config_with()).dispatches == (DEDUP,)
    on_nodes = megatron_args(*FLEX, *EP4, config=ON_NODES)
    assert on_nodes.lancet_test_line == f"{MAPPED}, one row per token and rank or node"
    assert choose_plan(on_nodes, ON_NODES)[0] == paired(fixed_plan(1, dispatch=TWO_HOP))
    assert planning_limits(on_nodes, ON_NODES).dispatches == (DEDUP, TWO_HOP)
    asked_otherwise = megatron_args(*FLEX, config=WITH_PLAIN)
    assert asked_otherwise.lancet_test_line == MAPPED
    assert choose_plan(asked_otherwise, WITH_PLAIN)[0] == paired(fixed_plan(1))
    # The default of Megatron's flag sends rows to all ranks; nobody has asked for fewer.
    default = megatron_args("--moe-token-dispatcher-type", "allgather")
    assert choose_plan(default, config_with())[0] == paired(fixed_plan(1))


@pytest.mark.parametrize(("changes", "reason"), IMPOSSIBLE.values(), ids=IMPOSSIBLE.keys())
def test_flex_says_where_its_rows_stay_plain(megatron_args, changes, reason):
    args = megatron_args(*FLEX, *changes)
    assert args.lancet_test_line == f"{MAPPED}, one row per token and expert"
    plan, line = choose_plan(args, config_with())
    assert plan.dispatch is PLAIN
    assert f"; dispatch is plain, because {reason}" in line


def test_run_is_tuned_where_dispatch_is_all_there_is_to_choose(megatron_args):
    """Micro-batches of one sample that are not paired, and dWs at once."""
    args = megatron_args("--micro-batch-size", 1)
    only = config_with(chunk_dim=ChunkDim.BATCH, dw_policy=DwPolicy.NONE, pairing=PairingChoice.OFF, tiles=0)
    assert is_tuned(args, only)
    assert not is_tuned(args, replace(only, dispatch=PLAIN))
    assert not is_tuned(args, replace(only, dispatch=DEDUP))
    assert choose_plan(args, replace(only, dispatch=DEDUP))[0] == deduplicated(1, DwPolicy.NONE)


def test_tuned_plan_of_checkpoint_fits_runs_with_same_dispatches(megatron_args):
    """The limits are part of what a tuned plan was made for."""
    args = megatron_args()
    found = {json.dumps(to_plain(planning_limits(args, config))) for config in (config_with(), WITH_PLAIN, WITH_DEDUP)}
    assert len(found) == 3
