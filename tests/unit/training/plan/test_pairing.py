"""``--lancet-pairing``: which runs may pair backwards with forwards, and the lines that say why others don't."""

import pytest

from megatron_lancet.config import PlanChoice
from megatron_lancet.errors import UsageError
from megatron_lancet.features.comm_priority.feature import CommPriorityFlags
from megatron_lancet.features.pairing.feature import PairingChoice
from megatron_lancet.features.tuning.feature import is_tuned
from megatron_lancet.plan_words import plan_text
from megatron_lancet.planning.plan_file import PlanFile, write_plan_file
from megatron_lancet.schedule.dispatch import PLAIN
from megatron_lancet.schedule.plan import ChunkDim, DwPolicy, OverlapRange, fixed_plan, paired
from megatron_lancet.schedule.reductions import CommPriority
from megatron_lancet.training.plan.flag_mapping import map_overlap_flags
from megatron_lancet.training.plan.limits import planning_limits
from megatron_lancet.training.plan.select import choose_plan
from tests.unit.training.configs import config_with
from tests.unit.training.validated import parsed

ON, OFF = config_with(pairing=PairingChoice.ON), config_with(pairing=PairingChoice.OFF)
PRIORITY = CommPriorityFlags(CommPriority.ALL_TO_ALL_FIRST)
PIPELINE = ["--pipeline-model-parallel-size", 4]
INTERLEAVED = [*PIPELINE, "--num-virtual-stages-per-pipeline-rank", 2]
ONE_MICRO_BATCH = ["--global-batch-size", 8]
TE = ["--transformer-impl", "transformer_engine"]


@pytest.fixture
def megatron_args(monkeypatch):
    """Megatron's arguments for a run that can pair, 4 micro-batches of 4 samples on 2 data-parallel ranks."""

    def make(*changes: object):
        args = parsed(monkeypatch, "--num-layers=8", *changes)
        map_overlap_flags(args, config_with())
        return args

    return make


PAIRABLE = {
    "plain": [],
    "full recompute": ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", 1],
    "selective recompute": ["--recompute-granularity", "selective", "--recompute-modules", "core_attn", "moe"],
    "tensor": ["--tensor-model-parallel-size", 2, "--sequence-parallel"],
    "expert tensor": ["--tensor-model-parallel-size", 2, "--sequence-parallel", "--expert-tensor-parallel-size", 2],
    "context": ["--context-parallel-size", 2],
    "capacity": ["--moe-expert-capacity-factor", 1.5, "--moe-pad-expert-input-to-capacity"],
    "sinkhorn": ["--moe-router-load-balancing-type", "sinkhorn"],
    "jitter": ["--moe-input-jitter-eps", 0.1],
    "shared experts": ["--moe-shared-expert-intermediate-size", 16],
    "distributed optimizer": ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"],
    "per-token loss": ["--calculate-per-token-loss"],
    "multi-token prediction": ["--mtp-num-layers", 1],
    "latent attention": ["--multi-latent-attention"],
    "dropout": ["--hidden-dropout", 0.1, "--attention-dropout", 0.1],
    "one sample": ["--micro-batch-size", 1],
    "delayed scaling": [*TE, "--fp8-format", "hybrid"],
    "delayed scaling with recompute": [
        *(*TE, "--fp8-format", "hybrid", "--recompute-granularity", "full", "--recompute-method", "uniform"),
        *("--recompute-num-layers", 1),
    ],
    "interleaved": INTERLEAVED,
    "interleaved, own order of messages": [*INTERLEAVED, "--no-overlap-p2p-communication", "--no-align-grad-reduce"],
    "timers and checks": ["--timing-log-level", 2, "--rerun-mode", "validate_results"],
    "a batch that grows": ["--global-batch-size", 8, "--step-batch-size-schedule", "0:8 1K:32"],
}


@pytest.mark.parametrize("changes", PAIRABLE.values(), ids=PAIRABLE.keys())
def test_auto_may_pair_on_pairs_and_off_does_not(megatron_args, changes):
    args = megatron_args(*changes)
    assert planning_limits(args, config_with()).pairing == (False, True)
    assert planning_limits(args, ON).pairing == (True,)
    for config in (config_with(), ON):
        plan, line = choose_plan(args, config)
        assert plan.is_paired
        assert plan.at_ends == plan.in_middle
        assert {segment.num_chunks for segment in plan.segments} == {1}
        assert line.startswith(plan_text(plan))
    limits = planning_limits(args, OFF)
    assert (limits.pairing, [one for one in limits.excluded if one.what == "pairing"]) == ((False,), [])
    plan, line = choose_plan(args, OFF)
    assert not plan.is_paired
    assert "paired" not in line


BLOCKED = {
    "one micro-batch": (
        ONE_MICRO_BATCH,
        (),
        "a step has one micro-batch (--global-batch-size 8, --micro-batch-size 4 on 2 data-parallel ranks)",
        "Raise --global-batch-size",
    ),
    "one micro-batch and a rest": (["--global-batch-size", 15], (), "a step has one micro-batch", "Raise"),
    "no virtual stages": (
        PIPELINE,
        (),
        "Megatron's loop for a pipeline without virtual stages has no place for a pair, and with one its first stage "
        "would keep 8 micro-batches in place of 4",
        "Pass --num-virtual-stages-per-pipeline-rank",
    ),
    "priority of all-to-alls": (
        [*INTERLEAVED, "--overlap-grad-reduce"],
        (PRIORITY,),
        "with virtual stages --lancet-comm-priority all-to-all-first would count the all-to-alls of the forward paired "
        "with a backward",
        "Drop --lancet-comm-priority",
    ),
}


@pytest.mark.parametrize(("changes", "wishes", "reason", "advice"), BLOCKED.values(), ids=BLOCKED.keys())
def test_pairing_is_excluded_with_a_reason_and_on_is_refused(megatron_args, tmp_path, changes, wishes, reason, advice):
    args = megatron_args(*changes)
    limits = planning_limits(args, config_with(*wishes))
    assert limits.pairing == (False,)
    assert next(one.reason for one in limits.excluded if one.what == "pairing").startswith(reason)
    for num_chunks in (None, 4):
        plan, line = choose_plan(args, config_with(*wishes, num_chunks=num_chunks))
        assert plan == fixed_plan(num_chunks or 2)
        assert line.startswith(f"{plan_text(plan)}; not paired, because {reason}")
        with pytest.raises(UsageError) as refusal:
            choose_plan(args, config_with(*wishes, num_chunks=num_chunks, pairing=PairingChoice.ON))
        assert str(refusal.value).startswith(f"--lancet-pairing on is not possible: {reason}")
        assert f". {advice}, or drop --lancet-pairing." in str(refusal.value) or advice == "Raise"
        assert "\n" not in str(refusal.value)
    # The user has not asked for it: there is nothing to explain.
    assert "paired" not in choose_plan(args, config_with(*wishes, pairing=PairingChoice.OFF))[1]

    path = tmp_path / "plan.json"
    write_plan_file(path, PlanFile(paired(fixed_plan(2)), None))
    with pytest.raises(UsageError) as refusal:
        choose_plan(args, config_with(*wishes, plan=path))
    assert str(refusal.value).startswith(
        f"--lancet-plan {path} pairs backwards with forwards, which is not possible here: {reason}"
    )
    assert str(refusal.value).endswith(", or make a plan for this run.")
    write_plan_file(path, PlanFile(fixed_plan(2), None))
    assert choose_plan(args, config_with(*wishes, plan=path))[0] == fixed_plan(2)


def test_line_gives_one_reason_and_the_limits_all(megatron_args):
    args = megatron_args(*PIPELINE, *ONE_MICRO_BATCH)
    assert choose_plan(args, config_with())[1].count("not paired") == 1
    assert [one.what for one in planning_limits(args, config_with()).excluded] == ["pairing"] * 2


def test_priority_of_all_to_alls_pairs_without_virtual_stages(megatron_args):
    args = megatron_args("--overlap-grad-reduce")
    assert planning_limits(args, config_with(PRIORITY)).pairing == (False, True)
    assert choose_plan(args, config_with(PRIORITY, pairing=PairingChoice.ON))[0] == paired(fixed_plan(1))


def test_pairing_needs_a_plan_and_expert_parallelism(megatron_args):
    with pytest.raises(UsageError, match=r"--lancet-pairing on needs the overlapping block, but --lancet-plan off .*"):
        choose_plan(megatron_args(), config_with(plan=PlanChoice.OFF, pairing=PairingChoice.ON))
    with pytest.raises(UsageError, match=r"--lancet-pairing on overlaps .* --expert-model-parallel-size is 1\. Drop"):
        choose_plan(megatron_args("--expert-model-parallel-size", 1), ON)
    for config in (OFF, config_with(plan=PlanChoice.OFF, pairing=PairingChoice.OFF)):
        assert choose_plan(megatron_args("--expert-model-parallel-size", 1), config)[0] is None


def test_pairing_contradicts_a_plan_file(megatron_args, tmp_path):
    path = tmp_path / "plan.json"
    write_plan_file(path, PlanFile(fixed_plan(2), None))
    for value in PairingChoice:
        with pytest.raises(UsageError, match=f"--lancet-pairing {value} contradicts --lancet-plan"):
            choose_plan(megatron_args(), config_with(plan=path, pairing=value))


def test_fixed_plan_runs_alike_at_the_ends(megatron_args):
    config = config_with(num_chunks=4, dw_policy=DwPolicy.NONE, pairing=PairingChoice.ON)
    plan, line = choose_plan(megatron_args(), config)
    assert plan == paired(fixed_plan(4, DwPolicy.NONE))
    assert plan.at_ends == plan.in_middle
    assert line == plan_text(plan)
    assert "(chunks=4 dim=batch range=stack dw=none dw-window=0 paired)" in line
    assert not is_tuned(megatron_args(), config)


@pytest.mark.parametrize(
    ("changes", "overlap_range"),
    [
        (["--micro-batch-size", 1], OverlapRange.STACK),
        (["--micro-batch-size", 1, "--moe-expert-capacity-factor", 1.5], OverlapRange.EXPERTS),
    ],
)
def test_run_is_tuned_where_pairing_is_all_that_can_overlap(megatron_args, changes, overlap_range):
    """A micro-batch of one sample is not cut, no dW waits: one chunk, paired or not."""
    args = megatron_args(*changes)
    only = {"chunk_dim": ChunkDim.BATCH, "dw_policy": DwPolicy.NONE, "dispatch": PLAIN, "tiles": 0}
    assert is_tuned(args, config_with(**only))
    assert is_tuned(args, config_with(**only, pairing=PairingChoice.ON))
    assert not is_tuned(args, config_with(**only, pairing=PairingChoice.OFF))
    assert not is_tuned(megatron_args(*changes, "--global-batch-size", 2), config_with(**only))
    plan, _ = choose_plan(args, config_with(**only, pairing=PairingChoice.ON))
    assert plan == paired(fixed_plan(1, DwPolicy.NONE, overlap_range=overlap_range))


def test_megatrons_flag_pairs_fixed_plans_not_tuned_ones(megatron_args):
    args = megatron_args("--overlap-moe-expert-parallel-comm")
    assert not args.overlap_moe_expert_parallel_comm
    for config in (config_with(), config_with(num_chunks=4)):
        assert choose_plan(args, config)[0] == paired(fixed_plan(config.num_chunks or 1))
        assert planning_limits(args, config).pairing == (False, True)
    assert is_tuned(args, config_with())
    assert choose_plan(args, OFF)[0] == fixed_plan(2)
    # Other flags for overlap do not ask for it.
    other = megatron_args("--moe-shared-expert-overlap")
    assert choose_plan(other, config_with(num_chunks=4))[0] == fixed_plan(4)


@pytest.mark.parametrize("changes", [PIPELINE, ONE_MICRO_BATCH])
def test_megatrons_flag_pairs_nothing_where_it_is_impossible(megatron_args, changes):
    plan, line = choose_plan(megatron_args("--overlap-moe-expert-parallel-comm", *changes), config_with())
    assert plan == fixed_plan(2)
    assert "; not paired, because " in line


@pytest.mark.parametrize(
    ("ends", "changes", "message"),
    [
        (fixed_plan(5), [], r"layers 1-end at the ends of a step \(chunks=5 .*--micro-batch-size is 4, so at most 4"),
        (fixed_plan(2), ["--moe-input-jitter-eps", 0.1], "at the ends of a step .*looks at the full micro-batch"),
        (
            fixed_plan(2, chunk_dim=ChunkDim.SEQUENCE),
            ["--context-parallel-size", 2],
            "at the ends of a step .*sequence chunks do not work with --context-parallel-size",
        ),
    ],
)
def test_segments_of_the_ends_are_checked_like_the_others(megatron_args, tmp_path, ends, changes, message):
    path = tmp_path / "plan.json"
    write_plan_file(path, PlanFile(paired(fixed_plan(1), ends), None))
    with pytest.raises(UsageError, match=message):
        choose_plan(megatron_args(*changes), config_with(plan=path))


def test_paired_plan_file_that_fits_is_taken(megatron_args, tmp_path):
    path, plan = tmp_path / "plan.json", paired(fixed_plan(1), fixed_plan(2))
    write_plan_file(path, PlanFile(plan, None))
    for changes in ([], INTERLEAVED, ["--hidden-dropout", 0.1]):
        taken, line = choose_plan(megatron_args(*changes), config_with(plan=path))
        assert taken == plan
        # Chunks at the ends draw random numbers chunk by chunk, too.
        assert ("dropout draws its random numbers chunk by chunk" in line) == ("--hidden-dropout" in changes)
