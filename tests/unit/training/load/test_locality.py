"""Which runs may draw tokens to their node's experts, and what they are told."""

from types import SimpleNamespace

import pytest

from megatron_lancet.config import LancetConfig
from megatron_lancet.errors import UsageError
from megatron_lancet.features.locality.feature import LocalityFlags, choose_locality, locality_note
from megatron_lancet.features.locality.loss import LocalityLoss
from megatron_lancet.schedule.nodes import Nodes
from megatron_lancet.schedule.plan import fixed_plan
from tests.unit.training.configs import config_with

PLAN = fixed_plan(2)


def arguments(**changes: object) -> SimpleNamespace:
    standard = {
        "expert_model_parallel_size": 4,
        "expert_tensor_parallel_size": None,
        "tensor_model_parallel_size": 1,
        "world_size": 4,
        "distributed_backend": "gloo",
    }
    return SimpleNamespace(**{**standard, **changes})


def config(coeff: float = 0.01, per_node: int | None = 2) -> LancetConfig:
    return config_with(LocalityFlags(coeff), ranks_per_node=per_node)


def test_there_is_no_such_loss_unless_the_user_asks():
    assert choose_locality(arguments(), config_with(), PLAN) is None
    assert choose_locality(arguments(expert_model_parallel_size=1), config_with(), None) is None
    assert locality_note(None) == ""


@pytest.mark.parametrize(("per_node", "nodes"), [(2, Nodes(2, 2)), (1, Nodes(4, 1))])
def test_the_loss_is_of_the_runs_nodes(per_node, nodes):
    found = choose_locality(arguments(), config(per_node=per_node), PLAN)
    assert found == LocalityLoss(0.01, nodes)
    assert locality_note(found).startswith(f"; locality loss 0.01 on {nodes}: the model trains with another loss")


@pytest.mark.parametrize(
    ("changes", "per_node", "plan", "message"),
    [
        ({}, 2, None, r"coeff 0.01 is a loss of the overlapping block's routers, .* Drop it, or --lancet-plan off"),
        ({}, None, PLAN, r"not known which ranks share a node. Pass --lancet-ranks-per-node N, .*, or drop the flag"),
        ({}, 4, PLAN, r"a node has 4, so nothing leaves a node. Drop the flag"),
        ({"expert_model_parallel_size": 1}, 2, None, r"--expert-model-parallel-size is 1 and every rank has all"),
    ],
)
def test_runs_without_the_block_or_nodes_are_refused_in_one_line(monkeypatch, changes, per_node, plan, message):
    for variable in ("LOCAL_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(UsageError, match=message) as refused:
        choose_locality(arguments(**changes), config(per_node=per_node), plan)
    assert "\n" not in str(refused.value)
