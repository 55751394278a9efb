"""CUDA's connections: Megatron's validation of a run with a plan accepts any number, and one is named with its cost."""

import argparse
import inspect
import os
import re

import pytest
import torch
from megatron.training import arguments

from megatron_lancet.config import PlanChoice
from megatron_lancet.errors import UsageError
from megatron_lancet.patching import replaced
from megatron_lancet.training.megatron import seams
from megatron_lancet.training.megatron.cluster_patches import any_number_of_connections
from megatron_lancet.training.plan.connections import one_connection_note, wants_one_connection
from megatron_lancet.training.platform.cuda_connections import CONNECTIONS
from tests.unit.training.configs import config_with


@pytest.mark.parametrize("number", ["32", None])
def test_validation_reads_one_connection_while_cuda_reads_users(monkeypatch, number):
    monkeypatch.delenv(CONNECTIONS, raising=False)
    if number is not None:
        monkeypatch.setenv(CONNECTIONS, number)
    with any_number_of_connections():
        assert arguments.os.environ.get(CONNECTIONS) == "1"
        assert arguments.os.getenv("PATH") == os.environ["PATH"]
        assert os.environ.get(CONNECTIONS) == number
    assert arguments.os is os


@pytest.mark.parametrize(
    ("stock", "other", "message"),
    [
        (
            "assert os.environ.get('CUDA_DEVICE_MAX_CONNECTIONS') == \"1\"",
            "assert _connections() == 1",
            "assertion of one",
        ),
        ("    args.sequence_parallel = False", "    os.environ['NCCL_PROTO'] = 'LL'", "leaves the environment"),
    ],
)
def test_other_validation_of_connections_is_a_missing_seam(stock, other, message):
    source = inspect.getsource
    assert stock in source(arguments.validate_args)
    with (
        replaced(inspect, "getsource", lambda function: source(function).replace(stock, other)),
        pytest.raises(UsageError, match=message),
    ):
        seams.check_seams()


NO_FLAGS = {
    "tensor_model_parallel_size": 2,
    "context_parallel_size": 1,
    "use_megatron_fsdp": False,
    "use_torch_fsdp2": False,
    "overlap_moe_expert_parallel_comm": False,
}


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ({}, True),
        ({"tensor_model_parallel_size": 1}, False),
        ({"tensor_model_parallel_size": 1, "context_parallel_size": 2}, True),
        ({"use_megatron_fsdp": True}, False),
        ({"use_torch_fsdp2": True}, False),
        ({"overlap_moe_expert_parallel_comm": True}, False),
    ],
)
def test_connections_of_stock_modules_are_megatrons(flags, wanted):
    args = argparse.Namespace(**NO_FLAGS | flags)
    assert wants_one_connection(args, config_with(plan=PlanChoice.OFF)) == wanted


def test_note_on_one_connection_is_for_gpus(monkeypatch):
    monkeypatch.setenv(CONNECTIONS, "1")
    assert re.match(rf"{CONNECTIONS} is 1: .* Set it to 32", str(one_connection_note(torch.device("cuda"))))
    assert one_connection_note(torch.device("cpu")) is None
    for number in ("8", "32"):
        monkeypatch.setenv(CONNECTIONS, number)
        assert one_connection_note(torch.device("cuda")) is None
    monkeypatch.delenv(CONNECTIONS)
    assert one_connection_note(torch.device("cuda")) is None
