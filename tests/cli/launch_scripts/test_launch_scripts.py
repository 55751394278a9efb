"""Launch scripts as engineers write them: their flags, their number of ranks, and its source."""

import argparse
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from megatron_lancet.config import OWN_SPEC
from megatron_lancet.errors import UsageError
from megatron_lancet.lab.launch.flag_file import flags_in
from megatron_lancet.lab.launch.launch import launch_of_script, read_launch
from tests.cli.launch_scripts.launches import COUNTS, FAILURES

SCRIPTS = Path(__file__).parent / "scripts"
COMMON = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 512 --max-position-embeddings 512 "
    "--num-experts 16 --moe-router-topk 2 --expert-model-parallel-size 8 --moe-token-dispatcher-type alltoall "
    "--disable-bias-linear --micro-batch-size 1 --lr 1e-4 --train-iters 100 --eval-interval 50 --bf16 "
    "--tokenizer-type NullTokenizer --vocab-size 32000 --mock-data"
)


@dataclass(frozen=True)
class Expected:
    """What a script launches.

    Attributes:
        flags: that differ from the common ones.
        arguments: of the script.
        environment: of the user.
        sets: some variables that the script sets for its training.
    """

    num_ranks: int
    source: str
    flags: str
    arguments: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    sets: dict[str, str] = field(default_factory=dict)


ONE_CONNECTION = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
EXPECTED = {
    "heredoc_mktemp": Expected(
        *(32, "#SBATCH --nodes=4 x torchrun --nproc-per-node 8", "--global-batch-size 64"),
        sets={"MASTER_ADDR": "node1", "MASTER_PORT": "6000"},
    ),
    "srun_container": Expected(
        *(32, "#SBATCH --nodes=4 --ntasks-per-node=8"),
        "--global-batch-size 64 --tensor-model-parallel-size 2 --sequence-parallel",
    ),
    "srun_bash_c": Expected(
        *(128, "#SBATCH --ntasks=128"),
        "--num-layers 8 --num-experts 64 --moe-router-topk 8 --moe-router-score-function sigmoid "
        "--pipeline-model-parallel-size 2 --expert-model-parallel-size 32 --global-batch-size 256",
        sets={"OMP_NUM_THREADS": "12", "WORLD_SIZE": "128", "RANK": "0", "LOCAL_RANK": "0"},
    ),
    "sbatch_nodes_only": Expected(
        *(64, "#SBATCH --nodes=8 x torchrun --nproc-per-node 8"),
        "--num-experts 64 --expert-model-parallel-size 64 --global-batch-size 128",
    ),
    "python_u_world_size": Expected(
        *(1024, "WORLD_SIZE=1024"),
        "--num-layers 8 --num-experts 64 --moe-router-topk 4 --expert-model-parallel-size 64 "
        "--pipeline-model-parallel-size 8 --global-batch-size 2048",
        sets={"MASTER_ADDR": "trainer-0", **ONE_CONNECTION},
    ),
    "arrays_pp4_vpp4_ep8": Expected(
        *(64, "#SBATCH --nodes=8 x torchrun --nproc-per-node 8"),
        "--num-layers 32 --num-experts 8 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 4 "
        "--num-layers-per-virtual-pipeline-stage 2 --use-distributed-optimizer --global-batch-size 256",
        sets={"NCCL_IB_TIMEOUT": "22", **ONE_CONNECTION},
    ),
    "module_env_file": Expected(
        *(12, "torchrun --nnodes 3 --nproc-per-node 4"),
        "--num-experts 12 --expert-model-parallel-size 12 --global-batch-size 24 --seed 5",
        *("--seed 5", {}, {"NCCL_SOCKET_IFNAME": "eth0"}),
    ),
    "functions_getopts": Expected(
        *(48, "torchrun --nnodes 1:6 --nproc-per-node gpu (8 GPUs a node assumed)"),
        "--num-layers 8 --num-experts 32 --global-batch-size 96 --seed 3",
        "-s large -n 6 -e -- --seed 3",
    ),
    "docker_entrypoint": Expected(
        *(16, "torchrun --nnodes 2 --nproc-per-node 8", "--expert-model-parallel-size 16 --global-batch-size 32"),
        sets={"NCCL_DEBUG": "INFO", **ONE_CONNECTION},
    ),
    "mpirun_apptainer": Expected(
        *(16, "mpirun -np 16", "--expert-model-parallel-size 16 --global-batch-size 32"),
        sets={"MASTER_ADDR": "gpu01", "NCCL_DEBUG": "WARN", "WORLD_SIZE": "16", **ONE_CONNECTION},
    ),
    "deepspeed": Expected(16, "deepspeed --num_nodes 2 --num_gpus 8", "--global-batch-size 32 --seed 2", "--seed 2"),
    "submit_sbatch": Expected(
        *(24, "sbatch --nodes=6 x #SBATCH --ntasks-per-node=4"),
        "--num-experts 24 --expert-model-parallel-size 24 --global-batch-size 48 --seed 7",
        sets={"SEED": "7", "MASTER_ADDR": "node1"},
    ),
    "enroot_login_shell": Expected(
        *(32, "#SBATCH --ntasks=32", "--expert-model-parallel-size 16 --global-batch-size 64"),
        sets={"NCCL_DEBUG": "WARN", "RANK": "0", "WORLD_SIZE": "32"},
    ),
    "srun_rank_of_procid": Expected(
        *(16, "srun --ntasks 16", "--tensor-model-parallel-size 2 --sequence-parallel --global-batch-size 32"),
        sets={"LOCAL_RANK": "0", **ONE_CONNECTION},
    ),
    "loop_over_nodes": Expected(
        *(40, "#SBATCH --nodes=5 x torchrun --nproc-per-node 8"),
        "--num-experts 40 --expert-model-parallel-size 40 --global-batch-size 80",
    ),
    "pbs_mpiexec": Expected(
        *(32, "#PBS -l select=4:ncpus=64:ngpus=8:mem=480gb x torchrun --nproc-per-node 8"),
        "--num-experts 32 --expert-model-parallel-size 32 --global-batch-size 64",
        sets={"MASTER_ADDR": "node1", **ONE_CONNECTION},
    ),
    "ssh_loop": Expected(
        *(24, "torchrun --nnodes 3 --nproc-per-node 8"),
        "--num-experts 24 --expert-model-parallel-size 24 --global-batch-size 48",
        sets={"NCCL_SOCKET_IFNAME": "ib0", **ONE_CONNECTION},
    ),
    "accelerate_machines": Expected(32, "accelerate launch --num_processes 32", "--global-batch-size 64"),
    "operator_world_size": Expected(
        *(32, "torchrun --nnodes 4 --nproc-per-node 8", "--expert-model-parallel-size 16 --global-batch-size 64"),
        environment={"WORLD_SIZE": "4", "RANK": "0"},
    ),
}


def as_dict(words: list[str]) -> dict[str, str]:
    """Values of flags; an empty text for a flag without a value."""
    values: dict[str, str] = {}
    name = ""
    for word in words:
        name = word if word.startswith("--") else name
        values[name] = "" if word == name else f"{values[name]} {word}".strip()
    return values


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Words of a launch, in an empty folder and the environment of its user."""

    def words(name: str) -> list[str]:
        expected = EXPECTED[name]
        for variable, value in expected.environment.items():
            monkeypatch.setenv(variable, value)
        return [str(SCRIPTS / f"{name}.sh"), *expected.arguments.split()]

    monkeypatch.chdir(tmp_path)
    for variable in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", *ONE_CONNECTION):
        monkeypatch.delenv(variable, raising=False)
    return words


def test_every_script_is_expected():
    assert {path.stem for path in SCRIPTS.glob("*.sh")} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_scripts_give_their_flags_and_ranks(name, start, tmp_path):
    expected = EXPECTED[name]
    launch = read_launch(start(name))
    assert (launch.num_ranks, launch.ranks_from) == (expected.num_ranks, expected.source)
    assert as_dict(launch.words) == as_dict([*COMMON.split(), *expected.flags.split()])
    assert launch.environment.items() >= expected.sets.items()
    assert not [one for one in launch.environment if one.startswith(("SLURM", "LANCET", "OMPI"))]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", EXPECTED)
def test_dry_runs_show_where_ranks_come_from(name, start, capsys):
    from megatron_lancet.lab.dry_run.command import run_command_line

    options = argparse.Namespace(trust_script=False, world_size=None, gpu_memory_gb=None)
    run_command_line(options, start(name))
    lines = capsys.readouterr().out.splitlines()
    expected = EXPECTED[name]
    assert f": {expected.num_ranks} ranks ({expected.source}) on GPUs" in lines[0]
    assert lines[-1].startswith("dry run passed")


@pytest.mark.parametrize("name", ["heredoc_mktemp", "enroot_login_shell", "mpirun_apptainer"])
def test_scripts_that_are_trusted_may_fill_new_files(name, start):
    launch = launch_of_script(SCRIPTS / f"{name}.sh", [], trusted=True)
    assert launch.num_ranks == EXPECTED[name].num_ranks


@pytest.mark.parametrize("text", COUNTS)
def test_number_of_ranks_and_its_source(text, start, tmp_path):
    command = text.replace("{train}", "pretrain_gpt.py --num-layers 2")
    (tmp_path / "train.sh").write_text(f"#!/bin/bash\n{command}\n")
    (tmp_path / "hosts").write_text("a slots=8\nb slots=8 # the last\n")
    launch = launch_of_script(tmp_path / "train.sh", [])
    assert launch.words == ["--num-layers", "2"]
    assert (launch.num_ranks, launch.ranks_from) == COUNTS[text]


def test_environment_comes_before_the_lines_of_a_script(start, monkeypatch):
    monkeypatch.setenv("SLURM_NNODES", "2")
    launch = read_launch(start("srun_container"))
    assert (launch.num_ranks, launch.ranks_from) == (16, "SLURM_NNODES=2 x #SBATCH --ntasks-per-node=8")


VARIABLES = (
    "JOB_ID JOBID PROCID LOCALID NODEID JOB_NODELIST NODELIST SUBMIT_DIR JOB_NAME CPUS_PER_TASK NNODES JOB_NUM_NODES "
    "NTASKS NPROCS NTASKS_PER_NODE TASKS_PER_NODE GPUS_ON_NODE GPUS_PER_NODE CPUS_ON_NODE JOB_PARTITION JOB_ACCOUNT"
)


def test_variables_of_slurm_are_set(start, tmp_path):
    lines = [f'export OF_{name}="$SLURM_{name}"' for name in VARIABLES.split()]
    options = "#SBATCH -J moe -N 2 --ntasks-per-node=4 --gres=gpu:a100:4 -c 6"
    (tmp_path / "train.sh").write_text("\n".join([options, "set -u", *lines, "python pretrain.py --num-layers 2"]))
    found = launch_of_script(tmp_path / "train.sh", []).environment
    values = {"JOB_NAME": "moe", "NTASKS": "8", "GPUS_ON_NODE": "4", "CPUS_PER_TASK": "6", "JOB_NODELIST": "node[1-2]"}
    values |= {"TASKS_PER_NODE": "4(x2)", "SUBMIT_DIR": str(tmp_path), "PROCID": "0", "LOCALID": "0"}
    assert found.items() >= {f"OF_{name}": value for name, value in values.items()}.items()
    assert all(found[f"OF_{name}"] for name in VARIABLES.split())


def test_hosts_get_what_ssh_sends_and_no_exports(start, tmp_path, monkeypatch):
    monkeypatch.setenv("OF_USER", "1")
    (tmp_path / "train.sh").write_text(
        "export OF_SCRIPT=1\n"
        'ssh -q a "export SENT=$OF_SCRIPT EXPORTED=\\${OF_SCRIPT:-no}; torchrun --nproc-per-node 2 pretrain.py"\n'
    )
    found = launch_of_script(tmp_path / "train.sh", []).environment
    assert found.items() >= {"SENT": "1", "EXPORTED": "no"}.items()
    assert not {"OF_SCRIPT", "OF_USER"} & set(found)


def test_trusted_scripts_run_nothing_of_other_hosts_here(start, tmp_path):
    script = tmp_path / "train.sh"
    script.write_text("ssh a 'rm -f x; torchrun --nproc-per-node 2 pretrain.py'\n")
    with pytest.raises(UsageError, match="the command of ssh was not run: without isolation it would change"):
        launch_of_script(script, [], trusted=True)


def test_pbs_variables_are_set(start, tmp_path):
    names = "PBS_JOBID PBS_O_WORKDIR PBS_JOBNAME PBS_QUEUE PBS_NUM_NODES PBS_NUM_PPN PBS_NP".split()
    lines = [f'export OF_{name}="${name}"' for name in names] + ["export FILE=$(tr '\\n' ' ' < $PBS_NODEFILE)"]
    script = tmp_path / "train.sh"
    script.write_text("\n".join(["#PBS -N moe -q debug", "#PBS -l nodes=2:ppn=2", "set -u", *lines, "torchrun p.py"]))
    found = launch_of_script(script, []).environment
    values = ["1.server", str(tmp_path), "moe", "debug", "2", "2", "4"]
    assert found.items() >= {f"OF_{name}": value for name, value in zip(names, values, strict=True)}.items()
    assert found["FILE"] == "node1 node1 node2 node2 "
    assert not [name for name in found if name.startswith("PBS_")]


def test_files_of_flags_are_launches(start, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    launch = read_launch([str(SCRIPTS / "module_env_file.args"), "--seed", "9"])
    expected = EXPECTED["module_env_file"].flags.replace("--seed 5", "--seed 9")
    assert as_dict(launch.words) == as_dict([*COMMON.split(), *expected.split()])
    assert (launch.num_ranks, launch.ranks_from) == (8, "WORLD_SIZE")
    (tmp_path / "one.args").write_text("\n# a comment\n--spec 'a b' c\\\n --data-path \"x #y\" # z\n")
    assert flags_in(tmp_path / "one.args") == ["--spec", "a b", "c", "--data-path", "x #y"]
    (tmp_path / "two.args").write_text("--lr 1\n--data-path 'x\n--seed 1\n")
    with pytest.raises(UsageError, match=r"two.args, line 2: No closing quotation"):
        read_launch([str(tmp_path / "two.args")])


@pytest.mark.parametrize("text", FAILURES)
def test_failures_name_the_line_and_a_remedy(text, start, tmp_path):
    (tmp_path / "train.sh").write_text(f"#!/bin/bash\n{text}\n")
    with pytest.raises(UsageError, match=FAILURES[text]):
        launch_of_script(tmp_path / "train.sh", [])


def test_launches_with_our_spec_are_of_our_own_script(start, tmp_path, monkeypatch):
    words = ["--spec", *OWN_SPEC, "--num-layers", "2"]
    script = tmp_path / "train.sh"
    script.write_text(f"LANCET_FLAGS='--lancet-plan off' torchrun pretrain_gpt.py {' '.join(words)}\n")
    found = read_launch([str(script)])
    assert found.words == ["--num-layers", "2", "--lancet-plan", "off"]
    assert "LANCET_FLAGS" not in found.environment
    monkeypatch.setenv("LANCET_FLAGS", "--lancet-num-chunks 4")
    assert read_launch(words).words == ["--num-layers", "2", "--lancet-num-chunks", "4"]
    monkeypatch.setenv("LANCET_FLAGS", "'")
    with pytest.raises(UsageError, match="LANCET_FLAGS: No closing quotation"):
        read_launch(words)
    assert read_launch(["--spec", "a.module", "b"]).words == ["--spec", "a.module", "b"]
