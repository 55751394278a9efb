"""The entry script with --lancet-dry-run, as a shell sees it: one process, output, exit status."""

import re
from pathlib import Path

import pytest

from tests.ranks import launch

TOOL = launch.REPO / "tools" / "dry_run.py"
SCRIPT = launch.REPO / "pretrain_gpt_moe.py"
SMALL = (
    "--lancet-dry-run --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 "
    "--max-position-embeddings 32 --num-experts 8 --expert-model-parallel-size 4 --disable-bias-linear --lr 1e-3 "
    "--tokenizer-type NullTokenizer --vocab-size 100 --eval-interval 10 --train-iters 10 --transformer-impl local "
    "--data-path /no/such_document --moe-token-dispatcher-type alltoall"
).split()
pytestmark = pytest.mark.distributed


def start(more: list[object], log_dir: Path, **environment: str) -> launch.RankResult:
    # Whoever waits for other ranks, or connects to them, does not come back.
    env = {"MASTER_PORT": "1", **environment}
    (result,) = launch.run(SCRIPT, [*SMALL, *more], 1, log_dir, timeout_s=60, env=env)
    return result


def test_dry_run_command_prints_all_findings(tmp_path):
    result = start([], tmp_path, WORLD_SIZE="1024", LANCET_UNUSED="")
    assert result.returncode == 0, result.output
    for part in ("1024 ranks (WORLD_SIZE)", "EP 4", "expert-DP 256", "parameters", "activations", "chunks=2 dim=batch"):
        assert part in result.output
    assert "data file not found: /no/such_document.idx" in result.output
    assert result.output.splitlines()[-1].startswith("dry run passed, ")
    assert len(result.output.splitlines()) < 40  # not Megatron's thousand arguments


def test_dry_run_command_prints_on_the_first_rank_only(tmp_path):
    result = start([], tmp_path, WORLD_SIZE="4", RANK="3")
    assert (result.returncode, result.output) == (0, "")


def test_dry_run_command_refuses_in_one_line(tmp_path):
    result = start(["--num-experts", 6], tmp_path, WORLD_SIZE="1024")
    assert result.returncode == 2
    last = result.output.splitlines()[-1]
    assert last.startswith(
        "error: --num-experts must be a multiple of --expert-model-parallel-size; got 6 experts on 4"
    )
    assert "Traceback" not in result.output


def test_dry_run_command_exits_with_3_where_a_rank_does_not_fit(tmp_path):
    result = start(["--lancet-gpu-memory-gb", "0.0001"], tmp_path, WORLD_SIZE="8")
    assert result.returncode == 3, result.output
    assert re.match(
        r"dry run: the arguments pass, but stage 0 does not fit: it needs 0\.\d\d GiB of 0\.0 \(--gpu-memory-gb",
        result.output.splitlines()[-1],
    )
    assert "GB of memory" not in result.output  # given, not assumed


def test_dry_run_of_a_script_has_its_ranks_and_own_flags(tmp_path):
    flags = " ".join(word for word in SMALL if word != "--lancet-dry-run")
    script = tmp_path / "train.sh"
    script.write_text(f"torchrun --nproc-per-node 8 --nnodes 4 pretrain_gpt.py {flags}\n")
    (result,) = launch.run(TOOL, [script], 1, tmp_path, timeout_s=60)
    assert result.returncode == 0, result.output
    assert "32 ranks (torchrun --nnodes 4 --nproc-per-node 8)" in result.output
    (result,) = launch.run(TOOL, ["--world-size", 64, script], 1, tmp_path, timeout_s=60)
    assert "64 ranks (--lancet-world-size)" in result.output


def test_dry_run_refuses_a_part_of_the_data_without_documents(tmp_path, token_data):
    """Megatron itself would count epochs of nothing, without an end."""
    result = start(["--data-path", token_data, "--split", "999,0.5,0.5"], tmp_path, WORLD_SIZE="8")
    assert result.returncode == 2
    assert re.match(
        r"error: --split 999,0\.5,0\.5 gives the valid part of .* none of its \d+ sequences, and Megatron would count",
        result.output.splitlines()[-1],
    )
