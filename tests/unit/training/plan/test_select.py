"""Which runs get a plan, and which are refused with the line that says what to drop."""

import re
from pathlib import Path

import pytest

from megatron_lancet.config import AttentionChoice, PlanChoice
from megatron_lancet.errors import UsageError
from megatron_lancet.features.pairing.feature import PairingChoice
from megatron_lancet.features.tuning.feature import is_tuned
from megatron_lancet.features.tuning.profile_to_file import check_can_profile
from megatron_lancet.plan_words import plan_text
from megatron_lancet.schedule.dispatch import PLAIN
from megatron_lancet.schedule.plan import ChunkDim, DwPolicy, OverlapRange, fixed_plan, paired
from megatron_lancet.training.plan.attention import needs_own_attention, uses_sdpa
from megatron_lancet.training.plan.limits import planning_limits
from megatron_lancet.training.plan.select import choose_plan
from tests.unit.training.configs import config_with, cut_with
from tests.unit.training.validated import parsed


@pytest.fixture
def megatron_args(monkeypatch):
    """Megatron's arguments for a run that can overlap, with changes."""

    def make(*changes: object, **attributes: object):
        args = parsed(monkeypatch, *changes)
        vars(args).update(attributes)
        return args

    return make


@pytest.mark.parametrize("pairing", [None, PairingChoice.ON])
def test_auto_plan_pairs_whole_micro_batches(megatron_args, pairing):
    plan, line = choose_plan(megatron_args(), config_with(pairing=pairing))
    assert plan == paired(fixed_plan(1))
    assert line == plan_text(plan)
    assert line.endswith("(chunks=1 dim=batch range=stack dw=fill dw-window=2 paired)")


@pytest.mark.parametrize(
    ("changes", "wishes", "expected"),
    [
        (["--global-batch-size", 8], {}, fixed_plan(2)),
        ([], {"pairing": PairingChoice.OFF}, fixed_plan(2)),
        ([], {"chunk_dim": ChunkDim.SEQUENCE}, fixed_plan(2, chunk_dim=ChunkDim.SEQUENCE)),
        ([], {"range": OverlapRange.GATE}, fixed_plan(2, overlap_range=OverlapRange.GATE)),
        (
            [],
            {"range": OverlapRange.GATE, "pairing": PairingChoice.ON},
            paired(fixed_plan(2, overlap_range=OverlapRange.GATE)),
        ),
        ([], {"num_chunks": 1}, fixed_plan(1)),
    ],
    ids=str,
)
def test_auto_plan_has_two_chunks_without_pairs_or_if_asked(megatron_args, changes, wishes, expected):
    assert choose_plan(megatron_args(*changes), config_with(**wishes))[0] == expected


@pytest.mark.parametrize(
    ("changes", "wishes", "tunes"),
    [
        ([], {}, True),
        ([], {"range": OverlapRange.EXPERTS, "dw_policy": DwPolicy.NONE, "chunk_dim": ChunkDim.BATCH}, True),
        ([], {"num_chunks": 2}, False),
        ([], {"plan": PlanChoice.OFF}, False),
        ([], {"plan": Path("plan.json")}, False),
        ([], {"profile": Path("profile.json")}, False),
        (["--micro-batch-size", 1], {"chunk_dim": ChunkDim.BATCH}, True),  # dWs can still wait
        (["--micro-batch-size", 1], {"chunk_dim": ChunkDim.BATCH, "dw_policy": DwPolicy.NONE}, True),  # or be paired
        (
            ["--micro-batch-size", 1],
            {
                "chunk_dim": ChunkDim.BATCH,
                "dw_policy": DwPolicy.NONE,
                "pairing": PairingChoice.OFF,
                "dispatch": PLAIN,
                "tiles": 0,
            },
            False,
        ),
    ],
)
def test_auto_plan_is_tuned_where_there_is_a_choice(megatron_args, changes, wishes, tunes):
    assert is_tuned(megatron_args(*changes), config_with(**wishes)) == tunes


def test_plan_off_selects_no_plan(megatron_args):
    plan, line = choose_plan(megatron_args(), config_with(plan=PlanChoice.OFF, num_chunks=4))
    assert plan is None
    assert "stock" in line


@pytest.mark.parametrize("experts", [2, 1], ids=["plan off", "no all-to-all"])
def test_stock_modules_name_the_fused_attention(megatron_args, experts):
    args = megatron_args("--expert-model-parallel-size", experts)
    choice = PlanChoice.OFF if experts > 1 else PlanChoice.AUTO
    for attention, is_named in (
        (AttentionChoice.SDPA, True),
        (AttentionChoice.STOCK, False),
        (AttentionChoice.AUTO, False),
    ):
        plan, line = choose_plan(args, config_with(plan=choice, attention=attention))
        assert plan is None
        assert line.endswith("stock Megatron modules with torch's fused attention") == is_named


def test_dw_memory_bound_is_part_of_the_plan(megatron_args):
    plan, line = choose_plan(megatron_args(), cut_with(dw_memory_mb=1.5))
    assert plan == fixed_plan(2, dw_memory_bytes=1_500_000)
    assert line.endswith("dw-memory=1.5MB)")
    with pytest.raises(UsageError, match=r"--lancet-dw-memory-mb 1\.5 .*--lancet-dw-policy none defers none"):
        choose_plan(megatron_args(), cut_with(dw_policy=DwPolicy.NONE, dw_memory_mb=1.5))


@pytest.mark.parametrize("changes", [["--expert-model-parallel-size", 1], ["--num-experts", 0]])
def test_plan_line_says_that_nothing_can_be_overlapped(megatron_args, changes):
    plan, line = choose_plan(megatron_args(*changes), config_with())
    assert plan is None
    assert "nothing to overlap" in line
    with pytest.raises(UsageError, match="there is none"):
        choose_plan(megatron_args(*changes), config_with(num_chunks=2))


def test_more_chunks_than_samples_or_tokens_are_refused(megatron_args):
    with pytest.raises(UsageError, match=r"--lancet-num-chunks 8 .*--micro-batch-size is 4\. Use at most 4"):
        choose_plan(megatron_args(), config_with(num_chunks=8, chunk_dim=ChunkDim.BATCH))
    with pytest.raises(UsageError, match=r"--lancet-num-chunks 33 .*--seq-length is 32\. Use at most 32"):
        choose_plan(megatron_args(), config_with(num_chunks=33))


@pytest.mark.parametrize(
    ("samples", "asked", "num_chunks", "dim"),
    [(8, None, 2, "batch"), (2, 2, 2, "batch"), (2, 3, 3, "sequence"), (1, None, 2, "sequence"), (1, 1, 1, "batch")],
)
def test_auto_plan_cuts_the_batch_where_it_has_enough_samples(megatron_args, samples, asked, num_chunks, dim):
    plan, _ = choose_plan(megatron_args("--micro-batch-size", samples), cut_with(num_chunks=asked))
    assert plan == fixed_plan(num_chunks, chunk_dim=ChunkDim(dim))


AGAINST_SEQUENCE = [
    (["--tensor-model-parallel-size", 2, "--sequence-parallel"], {}, "--sequence-parallel"),
    (["--context-parallel-size", 2], {}, "--context-parallel-size"),
    (["--reset-attention-mask"], {}, "--reset-attention-mask"),
    (["--window-size", "4,0"], {}, "--window-size"),
    (["--softmax-type", "learnable"], {}, "--softmax-type learnable"),
    ([], {"attention": AttentionChoice.STOCK}, "--lancet-attention stock"),
]


@pytest.mark.parametrize(
    ("changes", "wishes", "obstacle"), AGAINST_SEQUENCE, ids=[case[2] for case in AGAINST_SEQUENCE]
)
def test_sequence_chunks_are_refused_where_they_are_not_exact(megatron_args, changes, wishes, obstacle):
    with pytest.raises(UsageError, match=f"--lancet-chunk-dim sequence does not work with {obstacle}"):
        choose_plan(megatron_args(*changes), cut_with(chunk_dim=ChunkDim.SEQUENCE, **wishes))
    with pytest.raises(UsageError, match=f"sequence chunks do not work with {obstacle}"):
        choose_plan(megatron_args(*changes), cut_with(num_chunks=8, **wishes))
    ever = obstacle == "--sequence-parallel"
    advised = {"chunk_dim": ChunkDim.BATCH} if ever else {"chunk_dim": ChunkDim.SEQUENCE, "range": OverlapRange.GATE}
    assert choose_plan(megatron_args(*changes), cut_with(**advised, **wishes))[0].num_chunks > 1
    alone = megatron_args(*changes, "--micro-batch-size", 1, tensor_model_parallel_size=1)
    plan, line = choose_plan(alone, cut_with(**wishes))
    assert plan == fixed_plan(1)
    assert f"a micro-batch of 1 is not cut, because sequence chunks do not work with {obstacle}" in line


@pytest.mark.parametrize("setting", ["fp8_dot_product_attention", "fp8_multi_head_attention"])
def test_sequences_are_not_cut_with_attention_in_fp8(megatron_args, setting):
    """A model that was built without Megatron's arguments may have it."""
    args = megatron_args("--transformer-impl", "transformer_engine", "--micro-batch-size", 1)
    cut = cut_with(range=OverlapRange.STACK)
    assert choose_plan(args, cut)[0].num_chunks == 2
    setattr(args, setting, True)
    plan, line = choose_plan(args, cut)
    assert plan == fixed_plan(1)
    assert f"sequence chunks do not work with {setting}" in line
    assert ChunkDim.SEQUENCE not in planning_limits(args, config_with(range=OverlapRange.STACK)).chunk_dims
    args.transformer_impl = "local"  # whose attention is never in fp8
    assert choose_plan(args, cut)[0].num_chunks == 2


def test_profile_needs_a_run_that_is_long_enough(megatron_args, tmp_path):
    config = config_with(profile=tmp_path / "profile.json")
    check_can_profile(megatron_args("--train-iters", 100), config, fixed_plan(1))
    with pytest.raises(
        UsageError, match=r"--lancet-profile needs \d+ steps, found 12\. Pass --train-iters \d+, and no --exit"
    ):
        check_can_profile(megatron_args("--train-iters", 100, "--exit-interval", 12), config, fixed_plan(1))
    with pytest.raises(UsageError, match="found None"):
        check_can_profile(megatron_args(train_iters=None), config, fixed_plan(1))


def test_sequence_chunks_without_attention_work_with_cp(megatron_args):
    args = megatron_args("--context-parallel-size", 2, "--micro-batch-size", 1)
    gate = config_with(range=OverlapRange.GATE)
    assert choose_plan(args, gate)[0] == fixed_plan(2, chunk_dim=ChunkDim.SEQUENCE, overlap_range=OverlapRange.GATE)
    with pytest.raises(UsageError, match=r"--seq-length / --context-parallel-size is 16\. Use at most 16"):
        choose_plan(args, config_with(range=OverlapRange.GATE, num_chunks=17))


@pytest.mark.parametrize(
    "changes",
    [
        ["--moe-router-load-balancing-type", "sinkhorn"],
        ["--moe-expert-capacity-factor", 1.5],
        ["--moe-expert-capacity-factor", 1.5, "--moe-pad-expert-input-to-capacity"],
        ["--moe-input-jitter-eps", 0.1],
    ],
)
def test_routing_of_whole_micro_batches_narrows_range_with_note(megatron_args, changes):
    plan, line = choose_plan(megatron_args(*changes), cut_with())
    assert plan == fixed_plan(2, overlap_range=OverlapRange.EXPERTS)
    assert f"chunks start after the gate, because {changes[0]}" in line
    _, line = choose_plan(megatron_args(*changes), cut_with(range=OverlapRange.EXPERTS))
    assert "because" not in line


@pytest.mark.parametrize(
    ("changes", "attention", "message"),
    [
        (["--multi-latent-attention"], "stock", "--lancet-attention stock does not work with --multi-latent-attention"),
        (
            ["--context-parallel-size", 2],
            "stock",
            "--lancet-attention stock does not work with --context-parallel-size 2",
        ),
        (
            ["--window-size", "4,0", "--context-parallel-size", 2],
            "auto",
            "--window-size does not work with torch's fused attention, which --context-parallel-size 2 needs",
        ),
        (["--window-size", "4,0"], "sdpa", "--window-size does not work with torch's fused attention"),
        (
            ["--softmax-type", "learnable"],
            "sdpa",
            "--softmax-type learnable does not work with torch's fused attention",
        ),
    ],
)
def test_unavailable_attention_is_refused(megatron_args, changes, attention, message):
    for plan in PlanChoice:
        with pytest.raises(UsageError, match=message):
            choose_plan(megatron_args(*changes), config_with(plan=plan, attention=AttentionChoice(attention)))


def test_fused_attention_is_selected_by_flags_and_dropout(megatron_args):
    assert not uses_sdpa(megatron_args(), config_with())
    assert uses_sdpa(megatron_args(), config_with(attention=AttentionChoice.SDPA))
    for flag in (["--multi-latent-attention"], ["--context-parallel-size", 2]):
        assert uses_sdpa(megatron_args(*flag), config_with())
        assert needs_own_attention(megatron_args(*flag))
        assert not needs_own_attention(megatron_args(*flag, "--transformer-impl", "transformer_engine"))


def test_dropout_is_allowed_and_explained(megatron_args):
    _, line = choose_plan(megatron_args("--hidden-dropout", 0.1), cut_with())
    assert "dropout draws its random numbers chunk by chunk" in line


TE = ["--transformer-impl", "transformer_engine"]
FP8 = ["--fp8-format", "hybrid"]
FULL_RECOMPUTE = ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", 1]


@pytest.mark.parametrize(
    ("changes", "chunks", "note"),
    [
        ([], {}, ""),  # a sample of 32 positions is a multiple of 16 tokens
        (FULL_RECOMPUTE, {}, ""),
        (["--seq-length", 8], {"chunk_multiple": 2}, "delayed wants multiples of 2 samples (16 tokens) in a chunk"),
        (
            ["--micro-batch-size", 1, "--fp8-recipe", "tensorwise"],
            {"chunk_dim": ChunkDim.SEQUENCE, "chunk_multiple": 16},
            "tensorwise wants multiples of 16 positions (16 tokens) in a chunk",
        ),
    ],
)
def test_chunks_keep_multiple_that_fp8_wants_and_line_says_so(megatron_args, changes, chunks, note):
    plan, line = choose_plan(megatron_args(*TE, *FP8, *changes), cut_with())
    assert plan == fixed_plan(2, **chunks)
    assert line == "; ".join([plan_text(plan), *([f"--fp8-recipe {note}"] if note else [])])


def test_micro_batch_stays_whole_below_the_multiple_of_fp8(megatron_args):
    args = megatron_args(*TE, *FP8, "--fp8-recipe", "mxfp8", "--seq-length", 8)
    plan, line = choose_plan(args, cut_with())
    assert plan == fixed_plan(1, chunk_dim=ChunkDim.SEQUENCE)
    assert "a micro-batch of 8 positions is not cut, because --fp8-recipe mxfp8 wants multiples of 8 positions" in line
    no_choice = {"dw_policy": DwPolicy.NONE, "pairing": PairingChoice.OFF, "dispatch": PLAIN, "tiles": 0}
    assert not is_tuned(args, cut_with(**no_choice))
    with pytest.raises(UsageError, match=r"4, and --fp8-recipe mxfp8 wants .* Use at most 1 chunk, a larger micro-b"):
        choose_plan(args, cut_with(num_chunks=2, chunk_dim=ChunkDim.BATCH))


REFUSED: list[tuple[list, str]] = [
    (["--transformer-impl", "inference_optimized"], "--transformer-impl inference_optimized .*transformer_engine or"),
    ([*TE, "--tp-comm-overlap"], "--tp-comm-overlap .*userbuffers hold unchunked micro-batches"),
    ([*TE, "--use-transformer-engine-op-fuser"], "--use-transformer-engine-op-fuser"),
    ([*TE, "--use-te-activation-func"], "--use-te-activation-func"),
    ([*TE, "--fused-residual-rmsnorm"], "--fused-residual-rmsnorm"),
    ([*TE, "--moe-mlp-glu-interleave-size", 8], "--moe-mlp-glu-interleave-size .*--moe-grouped-gemm"),
    (FP8, "--fp8-format .*pass --transformer-impl transformer_engine"),
    (["--qk-clip"], "--qk-clip .*pass --transformer-impl transformer_engine"),
    (["--moe-token-dispatcher-type", "allgather"], "pass --moe-token-dispatcher-type alltoall"),
    (["--delay-wgrad-compute"], "the plan does what it asks for"),
    (["--use-megatron-fsdp"], "use --use-distributed-optimizer"),
    (["--moe-enable-routing-replay"], "--moe-enable-routing-replay"),
    (
        ["--recompute-granularity", "selective", "--recompute-modules", "layernorm"],
        "choose among core_attn, mlp, moe, .*and with --transformer-impl transformer_engine layernorm, mla_up_proj",
    ),
    (
        [*TE, "--recompute-granularity", "selective", "--recompute-modules", "layernorm", "gdn_norm_out"],
        "--recompute-modules gdn_norm_out does not work",
    ),
    (["--distribute-saved-activations"], "--distribute-saved-activations"),
    (["--spec", "mine", "layers"], "--spec mine layers"),
    (["--save-dgrads-interval", 5], "it would save one chunk for the full micro-batch"),
    (["--tensor-parallel-num-weight-shards", 2], "tensor-parallel-num-weight-shards 2 "),
    (["--expert-tensor-parallel-num-weight-shards", 2], "expert-tensor-parallel-num-weight-shards 2 "),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[" ".join(map(str, one)) for one, _ in REFUSED])
def test_unsupported_settings_keep_stock_with_a_reason(megatron_args, changes, message):
    args = megatron_args(*changes)
    plan, line = choose_plan(args, config_with())
    assert plan is None
    assert re.search("^off: --.*Stock Megatron modules", line)
    assert re.search(message, line)
    wishes = {"num_chunks": 2, "range": OverlapRange.GATE, "dw_policy": DwPolicy.NONE, "profile": Path("p.json")}
    for wish, value in wishes.items():
        with pytest.raises(UsageError, match=message) as refusal:
            choose_plan(args, config_with(**{wish: value}))
        assert "--lancet-plan off" in str(refusal.value)
    assert choose_plan(args, config_with(plan=PlanChoice.OFF))[0] is None


SEQUENCE_PARALLEL = ["--tensor-model-parallel-size", 2, "--sequence-parallel"]
SELECTIVE = ["--recompute-granularity", "selective", "--recompute-modules"]


@pytest.mark.parametrize(
    "changes",
    [
        SEQUENCE_PARALLEL,
        [*SEQUENCE_PARALLEL, "--expert-tensor-parallel-size", 2],
        ["--context-parallel-size", 2],
        ["--pipeline-model-parallel-size", 2],
        ["--pipeline-model-parallel-size", 2, "--num-virtual-stages-per-pipeline-rank", 2],
        ["--global-batch-size", 4],
        [*SELECTIVE, "core_attn", "mlp", "moe", "shared_experts"],
        FULL_RECOMPUTE,
        [*TE, "--qk-clip", "--log-max-attention-logit", "--mla-down-proj-fusion"],
        [*TE, "--moe-grouped-gemm", "--moe-mlp-glu-interleave-size", 8],
        [*TE, *FP8, *SELECTIVE, "core_attn", "moe", "mla_up_proj"],
        [*TE, *SELECTIVE, "layernorm", "mla_up_proj", "moe_act"],
        [*TE, *FP8, "--fp8-recipe", "tensorwise", *FULL_RECOMPUTE],
        [*TE, "--fp4-format", "e2m1", "--seq-length", 128],
        [*TE, "--context-parallel-size", 2, "--cp-comm-type", "a2a"],
    ],
    ids=lambda changes: " ".join(map(str, changes)),
)
def test_layouts_and_settings_that_get_a_plan(megatron_args, changes):
    assert choose_plan(megatron_args(*changes), cut_with())[0] == fixed_plan(2)


def test_fused_attention_of_torch_is_refused_with_te(megatron_args):
    with pytest.raises(UsageError, match="--lancet-attention sdpa is for local layers: Transformer Engine's"):
        choose_plan(megatron_args(*TE), config_with(attention=AttentionChoice.SDPA))
