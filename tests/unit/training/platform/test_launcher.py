"""How many ranks a node has, by the flag or by what the launcher says."""

import argparse

import pytest

from megatron_lancet.training.platform.launcher import ranks_per_node
from tests.unit.training.configs import config_with

TORCHRUN = {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}
SRUN = {"WORLD_SIZE": "16", "SLURM_STEP_NUM_TASKS": "16", "SLURM_STEP_TASKS_PER_NODE": "8(x2)"}
SBATCH = {"WORLD_SIZE": "16", "SLURM_NTASKS": "16", "SLURM_NTASKS_PER_NODE": "4"}
CASES = {
    "torchrun": (TORCHRUN, 8),
    "torchrun on two nodes": (TORCHRUN | {"GROUP_WORLD_SIZE": "2"}, 8),
    "torchrun on three unequal nodes": (TORCHRUN | {"GROUP_WORLD_SIZE": "3"}, None),
    "torchrun on a node with another number": (TORCHRUN | {"LOCAL_WORLD_SIZE": "6"}, None),
    "torchrun for another world": (TORCHRUN | {"WORLD_SIZE": "32"}, None),
    "torchrun under srun, one task a node": (TORCHRUN | SRUN | {"SLURM_STEP_TASKS_PER_NODE": "1(x2)"}, 8),
    "srun": (SRUN, 8),
    "srun on one node": (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "16"}, 16),
    "srun with unequal nodes": (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "9,7"}, None),
    "srun whose tasks are not the ranks": (SRUN | {"SLURM_STEP_NUM_TASKS": "2"}, None),
    "sbatch": (SBATCH, 4),
    "no launcher": ({}, None),
    "no number": (TORCHRUN | {"LOCAL_WORLD_SIZE": "eight"}, None),
}


@pytest.fixture
def environment(monkeypatch):
    names = {name for variables, _ in CASES.values() for name in variables}

    def set_to(variables):
        for name in names:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_to


@pytest.mark.parametrize(("variables", "number"), CASES.values(), ids=CASES.keys())
def test_ranks_per_node_of_the_launcher(environment, variables, number):
    environment(variables)
    args = argparse.Namespace(world_size=16, distributed_backend="nccl")
    assert ranks_per_node(args, config_with()) == number
    assert ranks_per_node(args, config_with(ranks_per_node=2)) == 2
    args.distributed_backend = "mock"
    assert ranks_per_node(args, config_with()) is None
    assert ranks_per_node(args, config_with(ranks_per_node=2)) == 2
