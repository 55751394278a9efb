"""CUDA graphs: Megatron's flags become ours where they can, and what can't be captured is refused."""

import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_lancet.config import OWN_SPEC, PlanChoice
from megatron_lancet.errors import UsageError
from megatron_lancet.feature import RunFacts
from megatron_lancet.features.cuda_graphs import feature
from megatron_lancet.features.cuda_graphs.feature import CUDA_GRAPHS, CudaGraphFlags, GraphChoice
from megatron_lancet.features.cuda_graphs.limits import blockers
from megatron_lancet.features.shortcut.feature import ShortcutFlags
from megatron_lancet.lab.dry_run.run import examine
from megatron_lancet.schedule.plan import ChunkDim, DwPolicy, fixed_plan, paired
from megatron_lancet.training.plan.normalize import normalize_args
from megatron_lancet.training.plan.select import choose_plan
from tests.unit.training.configs import config_with
from tests.unit.training.validated import set_as_validation_does

MOE = (
    "--num-experts 8 --expert-model-parallel-size 2 --micro-batch-size 4 --seq-length 32 --transformer-impl local "
    "--moe-token-dispatcher-type alltoall "
    "--hidden-dropout 0 --attention-dropout 0 --moe-router-load-balancing-type aux_loss"
)
LAUNCH_ARGS = Path(__file__).parents[3] / "launch_args"
SCOPES = "--cuda-graph-modules attn moe_router"
ON = config_with(CudaGraphFlags(GraphChoice.ATTENTION))
GPU = torch.device("cuda", 0)
ONE, TWO = fixed_plan(1), fixed_plan(2)


@pytest.fixture
def parsed(monkeypatch):
    """Megatron's arguments as its parser leaves them."""
    from megatron.training.arguments import parse_args

    def parse(flags: str = ""):
        monkeypatch.setattr(sys, "argv", ["pretrain", *f"{MOE} {flags}".split()])
        args = parse_args(ignore_unknown_args=True)
        set_as_validation_does(args)
        return args

    return parse


def changes(args, config) -> str:
    return "\n".join(CUDA_GRAPHS.normalize(args, config))


@pytest.mark.parametrize("implementation", ["local", "transformer_engine"])
@pytest.mark.parametrize("scopes", [SCOPES, f"{SCOPES} moe_preprocess", "--cuda-graph-scope attn moe_router"])
def test_megatrons_flags_become_ours(parsed, implementation, scopes):
    args = parsed(f"--cuda-graph-impl {implementation} {scopes}")
    lines = changes(args, config_with())
    assert f"--cuda-graph-impl {implementation} with attn moe_router" in lines
    assert "runs as --lancet-cuda-graphs attention" in lines
    assert (args.cuda_graph_impl, args.cuda_graph_modules, args.cuda_graph_scope_deprecated) == ("none", [], None)
    assert CUDA_GRAPHS.is_asked(args, config_with())
    assert choose_plan(args, config_with())[0] == paired(ONE)


@pytest.mark.parametrize(
    "flags",
    [
        "--cuda-graph-impl transformer_engine --cuda-graph-modules moe_router moe_preprocess",
        f"--cuda-graph-impl transformer_engine {SCOPES} mlp",
        "--cuda-graph-impl local",
        "--cuda-graph-impl full_iteration",
        f"--cuda-graph-impl transformer_engine {SCOPES} --fp8-format hybrid",
        f"--cuda-graph-impl transformer_engine {SCOPES} --use-megatron-fsdp",
    ],
)
def test_other_graphs_keep_stock_modules_under_auto(parsed, flags):
    args = parsed(flags)
    assert changes(args, config_with()) == ""
    assert args.cuda_graph_impl != "none"
    plan, line = choose_plan(args, config_with())
    assert plan is None
    assert line.startswith("off: ")
    assert "does not work with the overlapping block yet" in line


def test_flags_keep_their_meaning_without_a_plan(parsed):
    args = parsed(f"--cuda-graph-impl transformer_engine {SCOPES}")
    assert changes(args, config_with(plan=PlanChoice.OFF)) == ""
    assert args.cuda_graph_impl == "transformer_engine"


def test_refusal_of_other_graphs_names_ours(parsed):
    args = parsed("--cuda-graph-impl full_iteration")
    with pytest.raises(UsageError, match="pass --lancet-cuda-graphs attention in place of it"):
        choose_plan(args, config_with(num_chunks=1))


def test_masks_of_the_data_loader_are_switched_off(parsed):
    args = parsed()
    assert args.create_attention_mask_in_dataloader
    assert "--no-create-attention-mask-in-dataloader is on" in "\n".join(normalize_args(args, ON))
    assert not args.create_attention_mask_in_dataloader


def test_tracker_of_random_states_is_the_one_for_graphs(parsed):
    args = parsed("--transformer-impl transformer_engine")
    assert "--te-rng-tracker is on" in changes(args, ON)
    assert args.te_rng_tracker
    assert "--te-rng-tracker" not in changes(parsed(), ON)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--hidden-dropout 0.1", "--hidden-dropout 0.1 and --attention-dropout 0"),
        ("--attention-dropout 0.2", "--hidden-dropout 0 and --attention-dropout 0.2"),
        ("--moe-router-force-load-balancing", "--moe-router-force-load-balancing"),
        ("--moe-input-jitter-eps 0.1", "--moe-input-jitter-eps"),
        ("--fp8-format hybrid", "--fp8-format"),
        ("--tensor-model-parallel-size 2", "--tensor-model-parallel-size 2"),
        ("--context-parallel-size 2", "--context-parallel-size 2"),
        ("--recompute-granularity full", "--recompute-granularity full"),
        ("--recompute-granularity selective", "--recompute-modules core_attn"),
        ("--recompute-granularity selective --recompute-modules moe layernorm", "--recompute-modules layernorm"),
        ("--moe-router-load-balancing-type sinkhorn", "--moe-router-load-balancing-type sinkhorn"),
        (
            "--moe-router-load-balancing-type aux_loss global_aux_loss",
            "--moe-router-load-balancing-type global_aux_loss",
        ),
        ("--reset-attention-mask", "--reset-attention-mask"),
        ("--qk-clip", "--qk-clip"),
    ],
)
def test_what_cannot_be_captured_is_refused(parsed, flags, named):
    facts = RunFacts(parsed(flags), ON, ONE, device=GPU)
    with pytest.raises(UsageError, match=r"^--lancet-cuda-graphs does not work with ") as refusal:
        CUDA_GRAPHS.check(facts)
    assert named in str(refusal.value)


@pytest.mark.parametrize(
    ("flags", "needed"),
    [
        ("", "--no-create-attention-mask-in-dataloader"),
        ("--no-create-attention-mask-in-dataloader --transformer-impl transformer_engine", "--te-rng-tracker"),
    ],
)
def test_own_script_needs_the_flags_that_graphs_need(parsed, flags, needed):
    """Megatron has read its flags there, so they can't be changed."""
    words = f"--spec {' '.join(OWN_SPEC)} {flags}"
    with pytest.raises(UsageError, match=f"in Megatron's own script needs {needed}. Pass it too"):
        CUDA_GRAPHS.check(RunFacts(parsed(words), ON, ONE, device=GPU))
    CUDA_GRAPHS.check(RunFacts(parsed(f"{words} {needed}"), ON, ONE, device=GPU))


def test_wiring_that_cannot_be_captured_is_named(parsed):
    (found,) = blockers(parsed(), config_with(ShortcutFlags(shortcut_moe=True)))
    assert found.startswith("--lancet-shortcut-moe")


def test_fixed_plan_that_defers_nothing_is_refused(parsed):
    with pytest.raises(UsageError, match=r"defers none \(dw=none\). Pass --lancet-dw-policy fill"):
        CUDA_GRAPHS.check(RunFacts(parsed(), ON, fixed_plan(1, DwPolicy.NONE), device=GPU))


def test_recompute_of_experts_is_captured_around(parsed):
    flags = "--recompute-granularity selective --recompute-modules moe_act shared_experts"
    CUDA_GRAPHS.check(RunFacts(parsed(flags), ON, ONE, device=GPU))


def test_run_without_a_gpu_or_a_plan_is_refused(parsed):
    with pytest.raises(UsageError, match="needs a GPU"):
        CUDA_GRAPHS.check(RunFacts(parsed(), ON, ONE, device=torch.device("cpu")))
    with pytest.raises(UsageError, match="stock Megatron modules"):
        CUDA_GRAPHS.check(RunFacts(parsed(), ON, None, device=GPU))


def test_fixed_plan_that_cuts_all_layers_is_refused(parsed):
    sequence = fixed_plan(2, chunk_dim=ChunkDim.SEQUENCE)
    with pytest.raises(UsageError, match="Pass --lancet-chunk-dim batch or --lancet-num-chunks 1"):
        CUDA_GRAPHS.check(RunFacts(parsed(), ON, sequence, device=GPU))
    for facts in (
        RunFacts(parsed(), ON, paired(ONE, TWO), device=GPU),
        RunFacts(parsed(), ON, TWO, device=GPU),
        RunFacts(parsed(), ON, sequence, plan_changes=True, device=GPU),
        RunFacts(parsed(), ON, ONE, is_dry_run=True),
    ):
        CUDA_GRAPHS.check(facts)
        assert "captured in CUDA graphs" in CUDA_GRAPHS.note(facts)


@pytest.mark.parametrize("flag", ["--lancet-cuda-graphs attention", f"--cuda-graph-impl transformer_engine {SCOPES}"])
def test_launch_script_with_graphs_is_captured(monkeypatch, flag):
    text = (LAUNCH_ARGS / "megatron_mixtral_8x7b.args").read_text()
    arguments = shlex.split(f"--lancet-dry-run {text} {flag} --hidden-dropout 0 --attention-dropout 0")
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt_moe.py", *arguments])
    plan = examine().plan[0]
    assert plan.startswith("auto")
    assert "captured in CUDA graphs" in plan


def test_tuning_learns_that_graphs_change_a_step(monkeypatch):
    """Each capture of a settled run, before the first step with graphs."""

    class Graphs:
        is_installed, num_graphs = True, 2

        def __init__(self, block) -> None:
            log.append("eager ops")

        def begin_step(self) -> None:
            pass

        def capture(self) -> None:
            log.append("capture")

    log = []
    monkeypatch.setattr(feature, "StageGraphs", Graphs)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 0)
    steering = SimpleNamespace(step_changed=lambda: log.append("changed"))
    facts = SimpleNamespace(args=SimpleNamespace(cuda_graph_warmup_steps=2))
    setup = SimpleNamespace(stages=[SimpleNamespace(decoder=None)])
    run = SimpleNamespace(facts=facts, config=ON, setup=setup, is_settled=lambda: True, steering=steering)
    graphs = CUDA_GRAPHS.start(run)
    for _ in range(4):
        graphs.observe(lambda: log.append("step"))
    assert log == ["eager ops", "step", "step", "capture", "changed", "step", "step"]


def test_run_without_graphs_is_unchanged(parsed):
    args = parsed()
    assert changes(args, config_with(plan=Path("plan.json"))) == ""
    facts = RunFacts(args, config_with(), TWO, device=torch.device("cpu"))
    CUDA_GRAPHS.check(facts)
    assert CUDA_GRAPHS.note(facts) == ""
    assert args.create_attention_mask_in_dataloader
