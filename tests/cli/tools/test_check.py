"""``lancet check`` as a shell sees it, and what it takes from launch scripts."""

import json
from pathlib import Path

import pytest

from megatron_lancet.errors import UsageError
from megatron_lancet.lab.launch.launch import launch_of_script, read_launch
from tests.ranks import launch

TOOL = launch.REPO / "tools" / "check.py"
FLAGS = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 512 --max-position-embeddings 512 "
    "--num-experts 16 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --disable-bias-linear --bf16 "
    "--expert-model-parallel-size 8"
)
TORCHRUN = f"""#!/bin/bash
GPUS=$(nvidia-smi -L | wc -l)
export NCCL_ALGO=Ring
ARGS=({FLAGS})
mkdir -p checkpoints
rm -rf {{precious}}
torchrun --nproc-per-node "$GPUS" --nnodes 2 --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" pretrain_gpt.py \\
    "${{ARGS[@]}}" --lr "$1" 2>&1 | tee log.txt
"""
SCRIPTS = {
    "torchrun": (TORCHRUN, 16),
    "module": (f"python3 -m torch.distributed.run --nproc_per_node=4 pretrain_gpt.py {FLAGS} --lr $1", 4),
    "no launcher": (f"WORLD_SIZE=32 python pretrain_gpt.py {FLAGS} --lr $1", 32),
    "wrapped": (
        f"srun -N 2 -l bash -c 'torchrun --nproc-per-node=8 --nnodes=2 pretrain_gpt.py {FLAGS} --lr '$1",
        16,
    ),
    "srun of any Python": (
        f"srun -N 2 -n 16 python prepare.py --all\nsrun --label -n 16 $(command -v python) -u train.py {FLAGS} --lr $1",
        16,
    ),
    "module under mpirun": (f"mpirun -np 8 python -m my.train {FLAGS} --lr $1", 8),
    "file under srun": (f"srun -n 4 ./train.py {FLAGS} --lr $1", 4),
    "no launcher, another name": (f"python train.py {FLAGS} --lr $1", None),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_launch_scripts_are_read_and_start_nothing(name, tmp_path, monkeypatch):
    text, num_ranks = SCRIPTS[name]
    precious = tmp_path / "precious"
    precious.write_text("here")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    script = tmp_path / "train.sh"
    script.write_text(text.replace("{precious}", str(precious)))
    found = launch_of_script(script, ["1e-3"])
    assert found.words == [*FLAGS.split(), "--lr", "1e-3"]
    assert found.num_ranks == num_ranks
    assert sorted(path.name for path in tmp_path.iterdir()) == ["precious", "train.sh"]
    assert precious.read_text() == "here"
    if name == "torchrun":
        assert found.environment == {"NCCL_ALGO": "Ring"}


def test_own_examples_are_read(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    found = read_launch([str(launch.REPO / "examples" / "mixtral_8x7b.sh"), "--seed", "7"])
    assert found.words[-2:] == ["--seed", "7"]
    assert found.environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
    assert found.num_ranks % 8 == 0


@pytest.mark.parametrize("trusted", [False, True])
def test_scripts_do_not_write_over_files(tmp_path, monkeypatch, trusted):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "logs").mkdir()
    log = tmp_path / "logs" / "train.log"
    log.write_text("of an earlier run")
    script = tmp_path / "train.sh"
    script.write_text(f"sh -c 'torchrun --nproc-per-node 8 pretrain_gpt.py {FLAGS} > logs/train.log'\n")
    if trusted:
        with pytest.raises(UsageError, match=r"logs/train.log: cannot overwrite existing file"):
            launch_of_script(script, [], trusted=True)
    else:
        assert launch_of_script(script, []).num_ranks == 8
    assert log.read_text() == "of an earlier run"


def test_scripts_that_train_nothing_are_refused(tmp_path):
    script = tmp_path / "train.sh"
    script.write_text("echo no data here")
    with pytest.raises(UsageError, match=r"started no training: .* It printed: no data here"):
        launch_of_script(script, [])
    with pytest.raises(UsageError, match="there is no launch script"):
        read_launch([str(tmp_path / "other.sh")])


def start(words: list[object], folder: Path) -> launch.RankResult:
    (result,) = launch.run(TOOL, words, 1, folder, timeout_s=120)
    return result


@pytest.mark.distributed
def test_command_checks_a_script_and_writes_json(tmp_path):
    script = tmp_path / "train.sh"
    script.write_text(f"#!/bin/bash\nexport OUT={tmp_path}\ntorchrun --nproc-per-node 8 pretrain_gpt.py {FLAGS}\n")
    result = start(["--json", tmp_path / "found.json", script], tmp_path)
    assert result.returncode == 0, result.output
    assert "Megatron-Lancet check: 2 CPU ranks, EP 2, DP 2" in result.output
    assert "not checked: low precision (--bf16)" in result.output
    assert result.output.splitlines()[-1].startswith("equal: 3 runs in ")
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["ours"]["differs"] is False


@pytest.mark.distributed
def test_command_refuses_what_is_not_checked(tmp_path):
    result = start([*FLAGS.split(), "--use-megatron-fsdp"], tmp_path)
    assert result.returncode == 2
    assert result.output.splitlines()[-1].startswith("error: --use-megatron-fsdp is not checked")
