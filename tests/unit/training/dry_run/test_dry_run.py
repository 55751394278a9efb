"""Dry runs of real public launch scripts, and of ones that can't run."""

import os
import shlex
import sys
from dataclasses import dataclass

import pytest
import torch

from megatron_lancet.errors import UsageError
from megatron_lancet.lab.dry_run.cluster import has_package
from megatron_lancet.lab.dry_run.report import report
from megatron_lancet.lab.dry_run.run import run_dry
from megatron_lancet.plan_words import plan_text
from megatron_lancet.schedule.plan import ChunkDim, DwPolicy, fixed_plan, paired
from tests.unit.training.dry_run.lists import FSDP, LISTS, MIXTRAL, NAMES


@dataclass(frozen=True)
class Expected:
    """What a dry run says of a list.

    Attributes:
        num_ranks: ranks.
        total: billions of parameters; names of models say the same.
        active: billions of parameters that are active per token.
        may_pair: whether a plan may pair micro-batches: not in pipelines without virtual stages.
        is_short: whether its script has fewer steps than tuning takes.
        stock: why the run keeps stock modules; the others overlap as they are.
        does_fit: whether the largest rank's memory is below an H100's.
    """

    num_ranks: int
    total: float
    active: float
    may_pair: bool = True
    is_short: bool = False
    stock: str = ""
    does_fit: bool = True


LISTED = {
    "megatron_mixtral_8x7b": Expected(32, 46.70, 12.88, may_pair=False),
    "modelzoo_deepseek_v2_lite": Expected(8, 15.81, 2.77),
    "modelzoo_qwen3_30b_fullrecompute": Expected(8, 30.43, 3.26, does_fit=False),
    "modelzoo_mixtral_8x22b_capacity": Expected(64, 140.62, 39.15, stock="--tp-comm-overlap", does_fit=False),
    "modelzoo_deepseek_v3_h100_128k": Expected(256, 683.75, 39.35),
    "modelzoo_deepseek_v3_h100_a2aoverlap": Expected(512, 682.64, 38.24),
    "mcore_ft_top2router_tp2_ep": Expected(4, 0.24, 0.09),
    "mcore_ft_selective_recompute_pp2_ep4": Expected(8, 1.94, 0.71, is_short=True),
    "mcore_ft_cp2_pp2_ep2_sinkhorn": Expected(4, 0.14, 0.06, may_pair=False, is_short=True),
}


def test_real_scripts_are_all_tested():
    assert set(NAMES) == set(LISTED) == {path.stem for path in LISTS.glob("*.args")}


@pytest.mark.parametrize("name", NAMES)
def test_dry_run_accepts_real_scripts(dry_run, name):
    environment, expected = dict(os.environ), LISTED[name]
    findings = dry_run(name)
    sizes = (round(count / 1e9, 2) for count in (findings.size.total, findings.size.active))
    assert (findings.layout.num_ranks, *sizes) == (expected.num_ranks, expected.total, expected.active)
    assert findings.args.transformer_impl == "transformer_engine"
    assert any("data file not found" in warning for warning in findings.warnings)
    text = report(findings)
    verdict = "dry run passed, " if expected.does_fit else "dry run: the arguments pass, but stage "
    assert text.splitlines()[-1].startswith(verdict)
    assert f"{len(findings.warnings)} warnings" in text.splitlines()[-1]
    assert (findings.missing_bytes == 0) == expected.does_fit
    assert "gradient accumulation" in text
    assert all(memory.total > 0 for memory in findings.memory)
    # Nothing of Megatron's checks is left behind.
    assert dict(os.environ) == environment
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.distributed.is_initialized()
    if expected.stock:
        assert findings.plan[0].startswith(f"off: {expected.stock} does not work")
        findings = dry_run(name, without=(expected.stock,))
    if expected.is_short:
        assert "(fixed: 50 steps are fewer than the " in findings.plan[0]
        findings = dry_run(name, "--train-iters", 500, "--exit-interval", 500)
    assert findings.plan[0].startswith("auto (tuned during training)")
    _, _, may, *others = findings.plan
    assert may.endswith("; micro-batches not paired" + " or paired" * expected.may_pair)
    assert sum(line.startswith("paired micro-batches need up to ") for line in others) == expected.may_pair
    reason = "not pairing: Megatron's loop for a pipeline without"
    assert any(line.startswith(reason) for line in others) != expected.may_pair
    of_short_runs = findings.plan[0].split(";")[1]
    assert ("(chunks=1 " in of_short_runs) == (" paired" in of_short_runs) == expected.may_pair


TE_SCRIPTS = {
    "fp8, padded by the router": (
        "--fp8-format hybrid --fp8-recipe tensorwise --moe-router-padding-for-fp8 --moe-permute-fusion",
        "--moe-router-padding-for-fp8: rows are padded by the experts instead of the router",
    ),
    "delayed scaling": ("--fp8-format hybrid --fp8-param-gather --tp-comm-overlap", "--tp-comm-overlap is off: "),
    "MXFP8": ("--fp8-format e4m3 --fp8-recipe mxfp8 --moe-token-dispatcher-type flex --moe-enable-deepep", "flex runs"),
    "Megatron's own overlap": (
        "--overlap-moe-expert-parallel-comm --delay-wgrad-compute --moe-shared-expert-overlap "
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
        "the plan does what --overlap-moe-expert-parallel-comm, --delay-wgrad-compute, --moe-shared-expert-overlap ask",
    ),
    "documents": ("--dataloader-inter-document-masking --reset-attention-mask", "--reset-attention-mask is off: "),
    "recompute with current scaling": (
        "--fp8-format hybrid --fp8-recipe tensorwise --recompute-granularity selective --recompute-modules moe "
        "--cross-entropy-loss-fusion --cross-entropy-fusion-impl te",
        "--cross-entropy-fusion-impl is native instead of te",
    ),
}
"""Arguments of our own next to those of a list, and a part of a line on what is changed. None names the layers: they
are Transformer Engine's by default."""


@pytest.mark.parametrize(("more", "change"), TE_SCRIPTS.values(), ids=TE_SCRIPTS.keys())
def test_dry_run_of_transformer_engines_layers_has_a_plan(dry_run, more, change):
    findings = dry_run(MIXTRAL, *shlex.split(more))
    assert findings.args.transformer_impl == "transformer_engine"
    assert findings.plan[0].startswith("auto (tuned during training)")
    assert any(change in line for line in findings.changes)


def test_dry_run_names_only_what_keeps_a_run_from_overlapping(dry_run):
    """Flags that would be mapped stay as they are in such a run, and work."""
    flags = ("--use-transformer-engine-op-fuser", "--moe-token-dispatcher-type", "flex", "--moe-shared-expert-overlap")
    assert dry_run(MIXTRAL, *flags).plan == [
        "off: --use-transformer-engine-op-fuser does not work with the overlapping block yet (drop it). Stock Megatron "
        "modules, nothing is overlapped"
    ]


def test_dry_run_accepts_cuda_graphs_and_fsdp_and_names_them(dry_run):
    """Stock Megatron runs them, without a plan."""
    graphs = dry_run(MIXTRAL, "--cuda-graph-impl", "transformer_engine", "--cuda-graph-modules", "attn")
    assert graphs.plan[0].startswith("off: --cuda-graph-impl transformer_engine does not work")
    assert dry_run(MIXTRAL, *FSDP).plan[0].startswith("off: --use-megatron-fsdp does not work")


def test_dry_run_of_a_thousand_ranks(dry_run):
    findings = dry_run("modelzoo_deepseek_v3_h100_a2aoverlap", "--lancet-world-size", 1024)
    layout = findings.layout
    assert (layout.tensor, layout.pipeline, layout.virtual, layout.expert, layout.expert_tensor) == (2, 8, 4, 64, 1)
    assert (layout.data, layout.expert_data, layout.num_micro_batches) == (64, 2, 128)
    assert len(findings.memory) == 8
    assert [len(stage.layers) for stage in findings.stages] == [7, 8, 8, 8, 8, 8, 8, 6]


def test_dry_run_takes_number_of_ranks_from_flag_or_environment(dry_run, monkeypatch):
    assert "32 ranks (the fewest" in dry_run(MIXTRAL).target
    monkeypatch.setenv("WORLD_SIZE", "64")
    assert "64 ranks (WORLD_SIZE)" in dry_run(MIXTRAL).target
    assert "128 ranks (--lancet-world-size)" in dry_run(MIXTRAL, "--lancet-world-size", 128).target
    monkeypatch.setenv("RANK", "1")
    run_dry()  # the first rank speaks


@pytest.mark.parametrize(
    ("sizes", "world"),
    [
        ("--expert-model-parallel-size 4", 16),
        ("--tensor-model-parallel-size 2", 64),  # experts are cut, too
        ("--tensor-model-parallel-size 2 --expert-tensor-parallel-size 1", 32),
        ("--tensor-model-parallel-size 2 --context-parallel-size 2 --expert-model-parallel-size 2", 16),
    ],
)
def test_dry_run_defaults_to_the_fewest_ranks(dry_run, sizes, world):
    assert dry_run(MIXTRAL, *sizes.split(), "--no-rope-fusion").layout.num_ranks == world


def test_dry_run_shows_the_plan(dry_run):
    overlapping = ("--transformer-impl", "local")
    findings = dry_run(MIXTRAL, *overlapping)
    reason = (
        "Megatron's loop for a pipeline without virtual stages has no place for a pair, and with one its first stage "
        "would keep 8 micro-batches in place of 4"
    )
    fixed_line = f"{plan_text(fixed_plan(2, chunk_dim=ChunkDim.SEQUENCE))}; not paired, because {reason}"
    short_runs = "runs shorter than 68 steps (fewer with a cached profile) use"
    assert findings.plan[0] == f"auto (tuned during training); {short_runs} {fixed_line}"
    no_cache = dry_run(MIXTRAL, *overlapping, "--lancet-cache", "off")
    assert no_cache.plan[0] == f"auto (tuned during training); runs shorter than 68 steps use {fixed_line}"
    in_four = fixed_plan(4, DwPolicy.NONE, ChunkDim.SEQUENCE)
    fixed = dry_run(MIXTRAL, *overlapping, "--lancet-num-chunks", 4, "--lancet-dw-policy", "none")
    assert fixed.plan == [f"{plan_text(in_four)}; not paired, because {reason}"]
    assert f"not pairing: {reason}" in findings.plan
    interleaved = ("--num-virtual-stages-per-pipeline-rank", 2, "--lancet-num-chunks", 2, "--lancet-dw-policy", "none")
    in_pairs = dry_run(MIXTRAL, *overlapping, *interleaved, "--lancet-pairing", "on")
    assert in_pairs.plan == [
        plan_text(paired(fixed_plan(2, DwPolicy.NONE, ChunkDim.SEQUENCE))),
        "the activations above include a forward that runs during a backward",
    ]
    few = dry_run(MIXTRAL, *overlapping, "--train-iters", 20, "--micro-batch-size", 2)
    assert "chunks=2 dim=batch" in few.plan[0]
    assert "20 steps are fewer than" in few.plan[0]
    ends = dry_run(MIXTRAL, *overlapping, "--exit-interval", 20, "--micro-batch-size", 2)
    assert ends.plan[0] == few.plan[0]
    whole = dry_run(MIXTRAL, *overlapping, "--moe-expert-capacity-factor", 1.5)
    assert any("not ranges before dispatch: --moe-expert-capacity-factor" in line for line in whole.plan)
    absent = dry_run(MIXTRAL, *overlapping, "--lancet-plan", "/no/plan.json")
    assert absent.plan == ["from /no/plan.json, which is not here: it is checked when the run starts"]
    assert dry_run(MIXTRAL, "--lancet-plan", "off").plan == ["off: stock Megatron modules"]


def test_dry_run_maps_megatrons_overlap_flags(dry_run):
    flags = (
        "--overlap-moe-expert-parallel-comm",
        "--overlap-dispatch-backward-with-experts-wgrad",
        "--ep-overlap-early-attn-memory-release",
        "--defer-embedding-wgrad-compute",
    )
    findings = dry_run(MIXTRAL, "--transformer-impl", "local", "--moe-permute-fusion", *flags)
    assert any(f"the plan does what {', '.join(flags)} ask for" in line for line in findings.changes)
    assert not findings.args.overlap_moe_expert_parallel_comm
    kept = dry_run("modelzoo_deepseek_v3_h100_a2aoverlap", "--use-transformer-engine-op-fuser")
    assert kept.args.overlap_moe_expert_parallel_comm
    assert kept.args.delay_wgrad_compute


def test_dry_run_warns_of_packages_missing_here(dry_run):
    warnings = dry_run("modelzoo_deepseek_v3_h100_128k").warnings
    for package in ("transformer_engine", "flash_attn", "wandb", "tensorboard", "transformers"):
        assert any(package in warning for warning in warnings) == (not has_package(package))
    for part in ("--load: no such folder: /load", "unsloth/DeepSeek-V3"):
        assert any(part in warning for warning in warnings)


def test_dry_run_of_local_modules_needs_other_packages(dry_run):
    findings = dry_run(MIXTRAL, "--transformer-impl", "local", "--moe-router-fusion")
    if not has_package("transformer_engine"):
        assert sum("transformer_engine is not installed" in warning for warning in findings.warnings) == 2
    assert "--no-persist-layer-norm is on: there is no such kernel for RMSNorm" in findings.changes
    assert any("--no-create-attention-mask-in-dataloader is on" in change for change in findings.changes)
    kernels = ("--no-rope-fusion", "--no-gradient-accumulation-fusion", "--no-persist-layer-norm")
    no_masks = "--no-create-attention-mask-in-dataloader"
    plain = dry_run(MIXTRAL, "--transformer-impl", "local", *kernels, no_masks)
    assert plain.changes == []
    assert not any(name in text for text in plain.warnings for name in ("transformer_engine", "apex"))
    norms = dry_run(MIXTRAL, "--transformer-impl", "local", "--normalization", "LayerNorm")
    assert any("apex is not installed" in warning for warning in norms.warnings) == (not has_package("apex"))


def test_dry_run_validates_a_cpu_script_for_cpus(dry_run):
    findings = dry_run(MIXTRAL, "--distributed-backend", "gloo")
    assert "CPUs" in findings.target
    assert findings.plan[0].startswith("auto (tuned during training)")
    assert findings.args.transformer_impl == "local"
    assert not any("transformer_engine" in warning for warning in findings.warnings)
    with pytest.raises(UsageError, match="--fp8-format needs a GPU"):
        dry_run("modelzoo_deepseek_v3_h100_128k", "--distributed-backend", "gloo")


REFUSED = {
    "wrong flag": (["--num-layer", 4], r"unrecognized arguments: --num-layer 4.*did you mean --num-layers"),
    "world": (["--lancet-world-size", 30], r"multiple of tensor x pipeline x context parallel size = 4; there are 30"),
    "experts": (["--num-experts", 12], r"--num-experts must be a multiple .* 12 experts on 8"),
    "stage": (["--lancet-world-size", 4], r"must divide the ranks of a pipeline stage; there are 4 ranks"),
    "layers": (["--num-layers", 30], r"divisible by the pipeline-model-parallel size"),
    "heads": (["--num-attention-heads", 31], "--hidden-size 4096 is no multiple of --num-attention-heads 31"),
    "batch": (["--lancet-world-size", 96], r"Megatron refuses the arguments: .*256"),
    "width": (
        ["--tensor-model-parallel-size", 2, "--ffn-hidden-size", 14337],
        r"--ffn-hidden-size is 14337, which --tensor-model-parallel-size of 2 does not divide",
    ),
    "virtual stages": (
        ["--num-virtual-stages-per-pipeline-rank", 2, "--global-batch-size", 40],
        r"5 micro-batches a step do not fit the virtual pipeline stages",
    ),
    "group of virtual stages": (
        ["--num-virtual-stages-per-pipeline-rank", 2, "--microbatch-group-size-per-virtual-pipeline-stage", 64],
        r"per-virtual-pipeline-stage expects \d+ to \d+, the micro-batches of a step; got 64",
    ),
    "size below 1": (["--pipeline-model-parallel-size", 0], "--pipeline-model-parallel-size expects at least 1, got 0"),
    "no data": (["--data-path"], r"data"),
    "a wish that can't be": (
        ["--lancet-num-chunks", 2, "--use-transformer-engine-op-fuser"],
        r"--use-transformer-engine-op-fuser does not work .*drop it",
    ),
    "a pair that can't be": (
        ["--lancet-pairing", "on"],
        r"--lancet-pairing on is not possible: Megatron's loop for a pipeline without virtual stages",
    ),
    "a pair of one": (
        ["--lancet-pairing", "on", "--global-batch-size", 8, "--pipeline-model-parallel-size", 1],
        r"a step has one micro-batch \(--global-batch-size 8, --micro-batch-size 1 on 8 data-parallel ranks\)",
    ),
    "too many chunks": (
        ["--transformer-impl", "local", "--lancet-num-chunks", 3, "--lancet-chunk-dim", "batch"],
        r"--lancet-num-chunks 3 is more than the micro-batch can be cut into",
    ),
    "profile": (
        ["--transformer-impl", "local", "--lancet-profile", "/no/p.json"],
        "--lancet-profile: no such folder: /no",
    ),
    "no tokenizer size": (["--tokenizer-type", "NullTokenizer"], "NullTokenizer needs --vocab-size"),
}


@pytest.mark.parametrize(("more", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_dry_run_refuses_what_the_run_would_refuse(dry_run, more, message):
    with pytest.raises(UsageError, match=message) as refusal:
        dry_run(MIXTRAL, *more)
    assert "\n" not in str(refusal.value)


def test_lancet_world_size_is_refused_without_dry_run(monkeypatch):
    from megatron_lancet.training import arguments

    monkeypatch.setattr(sys, "argv", ["pretrain_gpt_moe.py", "--lancet-world-size", "8"])
    with pytest.raises(UsageError, match="--lancet-world-size 8 is for --lancet-dry-run"):
        arguments.parse()


def test_plan_with_two_hops_needs_the_ranks_of_a_node(dry_run):
    hops = ("--lancet-dispatch", "two-hop")
    (plan, *_) = dry_run(MIXTRAL, *hops, "--lancet-num-chunks", 1, "--lancet-ranks-per-node", 4).plan
    assert "(chunks=1 dim=batch range=stack dw=fill dw-window=4 dispatch=two-hop); two hops over 2 nodes x 4" in plan
    unknown = "not dispatch=two-hop: it is not known which ranks share a node (--lancet-ranks-per-node sets it)"
    assert unknown in dry_run(MIXTRAL).plan
    tuned = dry_run(MIXTRAL, "--lancet-ranks-per-node", 4).plan
    assert unknown not in tuned
    assert any("; dispatch plain or two-hop; " in line for line in tuned)
    with pytest.raises(UsageError, match=r"which ranks share a node\. Pass --lancet-ranks-per-node N, "):
        dry_run(MIXTRAL, *hops)
