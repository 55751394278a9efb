"""Faults as a user meets them, under torchrun: one message, an exit status that is not 0, and no hang."""

import subprocess
import sys

import pytest

from megatron_lancet.features.two_hop.order import TWO_HOP
from megatron_lancet.planning.plan_file import PlanFile, write_plan_file
from megatron_lancet.schedule.plan import fixed_plan
from tests.ranks import launch
from tests.ranks.pretraining import EP2, command_line

pytestmark = pytest.mark.distributed


def torchrun(arguments, env=None) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--master-addr", "127.0.0.1", "--master-port", str(launch.free_port()), "pretrain_gpt_moe.py"]
    environment = {**launch.rank_environment(0, 1, 0), **(env or {})}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name)
    return subprocess.run(
        [*command, *map(str, arguments)], env=environment, cwd=launch.REPO, capture_output=True, text=True, timeout=90
    )


def test_torchrun_shows_one_message_for_bad_input(token_data):
    done = torchrun(command_line(token_data, [*EP2, "--train-iters", "2", "--lancet-nun-chunks", "2"]))
    line = (
        "error: unrecognized arguments: --lancet-nun-chunks 2. --lancet-nun-chunks: did you mean --lancet-num-chunks? "
        "pretrain_gpt_moe.py --help lists all flags."
    )
    ours, report = done.stderr.split("torch.distributed.elastic.multiprocessing.errors.ChildFailedError", 1)
    assert done.returncode == 1
    assert ours.count(line) == 1
    assert 'Traceback (most recent call last):\n  File "/' not in ours.split("torch/distributed/elastic")[0]
    assert report.splitlines()[-2].strip() == f"traceback : {line}"
    assert "No CUDA runtime is found" not in done.stderr


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--data-path", "/no/such_document"], "data file not found: /no/such_document.idx"),
        (["--num-experts", "3"], "--num-experts must be a multiple of --expert-model-parallel-size; got 3 experts"),
        (["--lancet-num-chunks", "99"], "--lancet-num-chunks 99 is more than the micro-batch can be cut into"),
        (
            ["--lancet-chunk-dim", "sequence", "--reset-attention-mask"],
            "--lancet-chunk-dim sequence does not work with --reset-attention-mask",
        ),
        (["--seq-length", "64"], "Megatron refuses the arguments: max_position_embeddings (32) must be greater"),
    ],
    ids=["missing data", "experts", "chunks", "chunk dim", "megatron's own check"],
)
def test_bad_input_ends_with_one_message(token_data, tmp_path, extra, message):
    arguments = command_line(token_data, [*EP2, "--train-iters", "2", *extra])
    results = launch.run(launch.REPO / "pretrain_gpt_moe.py", arguments, 2, tmp_path)
    for result in results:
        assert result.returncode == 2
        assert result.output.count(f"error: {message}") == 1
        assert "Traceback" not in result.output
        assert "initialized tensor model parallel" not in result.output


HOPS = ["--lancet-dispatch", "two-hop"]


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--lancet-ranks-per-node", 4], "--lancet-ranks-per-node 4 does not divide the 6 ranks of the run: "),
        (
            [*HOPS, "--lancet-ranks-per-node", 3],
            "--lancet-dispatch two-hop is not possible: an expert-parallel group has 2 ranks, which do not fill ",
        ),
        (
            [*HOPS, "--moe-expert-capacity-factor", 1, "--moe-pad-expert-input-to-capacity"],
            "--lancet-dispatch two-hop is not possible: experts' inputs are padded to capacity, ",
        ),
        (
            ["--lancet-plan"],
            "--lancet-plan {plan} dispatches in two hops, which is not possible here: an expert-parallel ",
        ),
    ],
    ids=["ranks per node", "groups do not fill nodes", "padded capacity", "plan file on one node"],
)
def test_impossible_two_hops_end_before_ranks_meet(token_data, tmp_path, extra, message):
    """One of six ranks, all of which the launcher says to be on one node: the others never start."""
    plan = tmp_path / "plan.json"
    write_plan_file(plan, PlanFile(fixed_plan(2, dispatch=TWO_HOP), None))
    extra = [*extra, *([plan] if extra == ["--lancet-plan"] else [])]
    arguments = command_line(token_data, [*EP2, "--global-batch-size", 24, "--train-iters", "2", *extra])
    world = {"WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "6"}
    (result,) = launch.run(launch.REPO / "pretrain_gpt_moe.py", arguments, 1, tmp_path / "log", env=world)
    assert result.returncode == 2
    assert result.output.count(f"error: {message.format(plan=plan)}") == 1
    assert "Traceback" not in result.output


def test_wrong_megatron_version_is_refused(token_data, tmp_path):
    """A megatron-core of another version comes first on the path, as far as its metadata goes."""
    metadata = tmp_path / "megatron_core-0.16.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: megatron-core\nVersion: 0.16.1\n")
    env = {"PYTHONPATH": f"{tmp_path}:{launch.REPO}"}
    done = torchrun(command_line(token_data, [*EP2, "--train-iters", "2"]), env)
    assert done.returncode != 0
    line = "error: expected megatron-core<0.20,>=0.19, found megatron-core 0.16.1"
    assert done.stderr.count(f"\n{line}") + done.stderr.startswith(line) == 1
