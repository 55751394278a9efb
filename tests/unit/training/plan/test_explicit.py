"""``--lancet-plan FILE``: which files a run takes, and the one line that refuses the others."""

import dataclasses

import pytest

from megatron_lancet.config import AttentionChoice
from megatron_lancet.errors import UsageError
from megatron_lancet.plan_words import plan_text
from megatron_lancet.planning.plan_file import PlanFile, write_plan_file
from megatron_lancet.schedule.layers import LayerKind
from megatron_lancet.schedule.plan import ChunkDim, DwPolicy, OverlapRange, Plan, Segment, fixed_plan
from megatron_lancet.training.layer_pattern import layer_kinds
from megatron_lancet.training.plan.explicit import model_of_run, plan_from_file
from megatron_lancet.training.plan.limits import planning_limits
from megatron_lancet.training.plan.select import choose_plan
from tests.unit.training.configs import config_with
from tests.unit.training.validated import parsed

LAYERS_2_3 = Plan((Segment(1, 1, 1), Segment(2, None, 4, ChunkDim.SEQUENCE)), DwPolicy.FILL, dw_window=8)


@pytest.fixture
def megatron_args(monkeypatch):
    """Megatron's arguments for a run that can overlap, with changes."""
    return lambda *changes: parsed(monkeypatch, "--num-layers=3", "--moe-router-topk=2", *changes)


@pytest.fixture
def written(tmp_path):
    def write(plan, made_for=None):
        path = tmp_path / "plan.json"
        write_plan_file(path, PlanFile(plan, made_for))
        return path

    return write


def test_plan_file_that_fits_is_taken(megatron_args, written):
    args = megatron_args("--moe-layer-freq", "[0,1,1]")
    made_for = model_of_run(args, config_with())
    assert (made_for.num_layers, made_for.moe_layers, made_for.seq_length, made_for.topk) == (3, "2-3", 32, 2)
    path = written(LAYERS_2_3, made_for)
    plan, line = choose_plan(args, config_with(plan=path))
    assert plan == LAYERS_2_3
    assert line == f"{plan_text(LAYERS_2_3)} from {path}"


def test_moe_layer_pattern_of_every_second_layer(megatron_args):
    assert model_of_run(megatron_args("--moe-layer-freq", 2), config_with()).moe_layers == "1, 3"


def test_hybrid_plan_does_not_fit_a_gpt_with_as_many_layers(megatron_args, written):
    args = megatron_args("--hybrid-layer-pattern", "*E-", "--transformer-impl", "transformer_engine")
    assert (model_of_run(args, config_with()).moe_layers, model_of_run(args, config_with()).pattern) == ("2", "*E-")
    path = written(fixed_plan(2), model_of_run(args, config_with()))
    plan, _ = choose_plan(args, config_with(plan=path))
    assert plan == fixed_plan(2)
    with pytest.raises(UsageError, match=r"pattern is \*E- in the plan file, None in the run"):
        choose_plan(megatron_args("--moe-layer-freq", "[0,1,0]"), config_with(plan=path))


def test_moe_layer_pattern_has_the_models_length(megatron_args):
    moe, dense = LayerKind.MOE, LayerKind.DENSE
    assert layer_kinds(megatron_args("--moe-layer-freq", "[1,0,1]")) == [moe, dense, moe]
    assert layer_kinds(megatron_args("--num-experts", 0)) == [dense] * 3
    with pytest.raises(UsageError, match="--moe-layer-freq is a pattern of 2 layers, --num-layers is 3"):
        layer_kinds(megatron_args("--moe-layer-freq", "[1,0]"))


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        (["--micro-batch-size", 2], "micro_batch_size is 4 in the plan file, 2 in the run"),
        (["--moe-layer-freq", 2], "moe_layers is 1-3 in the plan file, 1, 3 in the run"),
        (["--num-layers", 6], "num_layers is 3 in the plan file, 6 in the run"),
        (["--expert-model-parallel-size", 1], "ep_size is 2 in the plan file, 1 in the run"),
        (["--context-parallel-size", 2], "seq_length is 32 in the plan file, 16 in the run"),
        (["--tensor-model-parallel-size", 2, "--sequence-parallel"], "seq_length is 32 in the plan file, 16 in the"),
    ],
)
def test_plan_file_for_another_run_is_refused(megatron_args, written, changes, difference):
    path = written(fixed_plan(2), model_of_run(megatron_args(), config_with()))
    with pytest.raises(UsageError, match=r"--lancet-plan .*plan\.json was made for another model .*: .*" + difference):
        choose_plan(megatron_args(*changes), config_with(plan=path))


@pytest.mark.parametrize(
    ("wish", "flag"),
    [
        ({"num_chunks": 2}, "--lancet-num-chunks 2"),
        ({"chunk_dim": ChunkDim.BATCH}, "--lancet-chunk-dim batch"),
        ({"range": OverlapRange.STACK}, "--lancet-range stack"),
        ({"dw_policy": DwPolicy.FILL}, "--lancet-dw-policy fill"),
        ({"dw_memory_mb": 1.5}, r"--lancet-dw-memory-mb 1\.5"),
    ],
)
def test_flags_that_contradict_a_plan_file_are_refused(megatron_args, written, wish, flag):
    with pytest.raises(UsageError, match=flag + " contradicts --lancet-plan"):
        choose_plan(megatron_args(), config_with(plan=written(fixed_plan(2)), **wish))


def test_plan_file_with_the_fused_kernel_contradicts_stocks(megatron_args, written):
    path = written(dataclasses.replace(fixed_plan(1), fused_attention=True))
    assert plan_from_file(path, megatron_args(), config_with(plan=path)).fused_attention
    with pytest.raises(UsageError, match=r"--lancet-attention stock contradicts .*: the file sets fused_attention"):
        plan_from_file(path, megatron_args(), config_with(plan=path, attention=AttentionChoice.STOCK))


@pytest.mark.parametrize(
    ("plan", "changes", "config", "message"),
    [
        (fixed_plan(5), [], {}, r"layers 1-end .*--micro-batch-size is 4, so at most 4 chunks fit"),
        (fixed_plan(2), ["--moe-input-jitter-eps", 0.1], {}, "--moe-input-jitter-eps looks at the full micro-batch"),
        (LAYERS_2_3, ["--context-parallel-size", 2], {}, "layers 2-end .*do not work with --context-parallel-size"),
        (LAYERS_2_3, [], {"attention": AttentionChoice.STOCK}, "do not work with --lancet-attention stock"),
        (LAYERS_2_3, ["--num-layers", 1], {}, "its last segment is layers 2-end of 1"),
        (fixed_plan(2), ["--expert-model-parallel-size", 1], {}, "there is none: --expert-model-parallel-size is 1"),
    ],
)
def test_plan_file_that_the_run_cannot_follow_is_refused(megatron_args, written, plan, changes, config, message):
    with pytest.raises(UsageError, match=message):
        choose_plan(megatron_args(*changes), config_with(plan=written(plan), **config))


FP8 = ["--transformer-impl", "transformer_engine", "--fp8-format", "hybrid"]


@pytest.mark.parametrize(
    ("plan", "changes", "message"),
    [
        (
            fixed_plan(3, chunk_dim=ChunkDim.SEQUENCE),
            ["--micro-batch-size", 1, "--seq-length", 96, "--fp8-recipe", "mxfp8", "--moe-layer-freq", 1],
            None,
        ),
        (
            fixed_plan(3, chunk_dim=ChunkDim.SEQUENCE),
            ["--micro-batch-size", 1, "--seq-length", 64],
            "its chunks have 22, 21, 21 positions, and --fp8-recipe delayed wants multiples of 16 positions "
            r"\(16 tokens\) in a chunk\. Make a plan for this run",
        ),
        (
            fixed_plan(4),
            ["--fp8-recipe", "blockwise"],
            "its chunks have 1, 1, 1, 1 samples, and --fp8-recipe blockwise wants multiples of 4 samples",
        ),
        (fixed_plan(3, chunk_dim=ChunkDim.SEQUENCE, chunk_multiple=16), ["--seq-length", 64], None),
        (fixed_plan(3, chunk_dim=ChunkDim.SEQUENCE, chunk_multiple=16), [], "--seq-length is 32, so at most 2 chunks"),
        (
            fixed_plan(2, chunk_dim=ChunkDim.SEQUENCE, chunk_multiple=24),
            [],
            "--seq-length is 32, so at most 1 chunk fit",
        ),
    ],
)
def test_plan_file_keeps_the_multiple_of_the_recipe(megatron_args, written, plan, changes, message):
    args, config = megatron_args(*FP8, *changes), config_with()
    if message is None:
        assert plan_from_file(written(plan), args, config) == plan
    else:
        with pytest.raises(UsageError, match=message):
            plan_from_file(written(plan), args, config)


def test_plan_file_of_one_chunk_fits_any_settings(megatron_args, written):
    args = megatron_args("--context-parallel-size", 2, "--moe-input-jitter-eps", 0.1)
    plan = fixed_plan(1, chunk_dim=ChunkDim.SEQUENCE)
    assert choose_plan(args, config_with(plan=written(plan)))[0] == plan


def test_damaged_plan_file_is_refused_with_one_line(megatron_args, written):
    path = written(fixed_plan(2))
    path.write_text(path.read_text()[:-20])
    with pytest.raises(UsageError, match=r"--lancet-plan .*plan\.json: no JSON, or damaged"):
        choose_plan(megatron_args(), config_with(plan=path))


def test_limits_of_a_run_without_restrictions(megatron_args):
    limits = planning_limits(megatron_args(), config_with())
    assert limits.num_chunks is None
    assert set(limits.chunk_dims) == set(ChunkDim)
    assert set(limits.ranges) == set(OverlapRange)
    assert set(limits.dw_policies) == set(DwPolicy)
    assert (limits.dw_memory_bytes, limits.excluded) == (None, ())


def test_limits_follow_the_flags(megatron_args):
    config = config_with(
        num_chunks=4, chunk_dim=ChunkDim.SEQUENCE, range=OverlapRange.GATE, dw_policy=DwPolicy.FILL, dw_memory_mb=2.0
    )
    limits = planning_limits(megatron_args(), config)
    assert (limits.num_chunks, limits.chunk_dims, limits.ranges) == ((4,), (ChunkDim.SEQUENCE,), (OverlapRange.GATE,))
    assert (limits.dw_policies, limits.dw_memory_bytes) == ((DwPolicy.FILL,), 2_000_000)


def test_limits_have_what_the_run_does_not_allow(megatron_args):
    whole = planning_limits(megatron_args("--moe-expert-capacity-factor", 1.5), config_with())
    assert whole.ranges == (OverlapRange.EXPERTS,)
    assert "--moe-expert-capacity-factor looks at the full micro-batch" in whole.excluded[0].reason

    args = megatron_args("--context-parallel-size", 2)
    batch = planning_limits(args, config_with())
    assert (batch.chunk_dims, len(batch.ranges)) == ((ChunkDim.BATCH,), 3)
    assert batch.excluded[0].reason == "they do not work with --context-parallel-size"
    # One sample can only be cut along the sequence: then the range with attention is excluded.
    alone = planning_limits(megatron_args("--context-parallel-size", 2, "--micro-batch-size", 1), config_with())
    assert alone.ranges == (OverlapRange.EXPERTS, OverlapRange.GATE)
    assert ChunkDim.SEQUENCE in alone.chunk_dims
    assert [one.what for one in alone.excluded if "sequence chunks" in one.reason] == ["range=stack"]
    with pytest.raises(UsageError, match="--lancet-chunk-dim sequence does not work with --context-parallel-size"):
        planning_limits(args, config_with(chunk_dim=ChunkDim.SEQUENCE, range=OverlapRange.STACK))


def test_limits_say_which_sizes_of_chunks_fp8_wants(megatron_args):
    limits = planning_limits(megatron_args(*FP8, "--fp8-recipe", "blockwise"), config_with(tiles=0))
    # 4 samples of 32 positions: a block of 128 tokens is the full micro-batch.
    wants = "--fp8-recipe blockwise wants multiples of {} (128 tokens) in a chunk"
    assert {one.what: one.reason for one in limits.excluded} == {
        "other sizes of chunks along batch": wants.format("4 samples"),
        "other sizes of chunks along sequence": wants.format("32 positions"),
    }
    batch_only = config_with(chunk_dim=ChunkDim.BATCH, tiles=0)
    assert planning_limits(megatron_args(*FP8, "--seq-length", 64), batch_only).excluded == ()


def test_limits_and_refusals_agree(megatron_args, written):
    """Whatever the limits allow is not refused as a file."""
    for changes in ([], ["--context-parallel-size", 2], ["--moe-input-jitter-eps", 0.1], ["--micro-batch-size", 1]):
        args = megatron_args(*changes)
        limits = planning_limits(args, config_with())
        for dim in limits.chunk_dims:
            for one in limits.ranges:
                plan = fixed_plan(1 if args.micro_batch_size == 1 and dim is ChunkDim.BATCH else 2, chunk_dim=dim)
                segments = (dataclasses.replace(plan.segments[0], range=one),)
                plan = dataclasses.replace(plan, segments=segments)
                assert choose_plan(args, config_with(plan=written(plan)))[0] == plan
