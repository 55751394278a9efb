"""Which runs can be mocked, and what the others are told."""

import sys
from contextlib import ExitStack

import pytest
import torch.distributed as dist

from megatron_lancet.errors import UsageError
from megatron_lancet.feature import RunFacts
from megatron_lancet.features.two_hop.feature import NODES
from megatron_lancet.testkit.mock.link import Link
from megatron_lancet.testkit.mock.run import MOCKED_WORLD, MockFlags, mocked_world_of
from megatron_lancet.training import arguments
from megatron_lancet.training.platform.launcher import is_mocked

ALL_TO_ALL = ("--expert-model-parallel-size", 8, "--moe-token-dispatcher-type", "alltoall")
MOCK = ("--distributed-backend", "mock")


@pytest.fixture
def parsed(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def parse(*words: object, **environment: str):
        monkeypatch.setattr(sys, "argv", ["pretrain_gpt_moe.py", *map(str, words)])
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        return arguments.parse([NODES, MOCKED_WORLD])

    return parse


def test_mock_flags_describe_the_mocked_world(parsed):
    args, config = parsed(*MOCK, "--lancet-mock-link", "20:12.5", WORLD_SIZE="8")
    assert is_mocked(args)
    MOCKED_WORLD.check_arguments(args, config)
    assert config.of(MockFlags).mock_link == Link(20, 12.5)
    assert "rank 0 of 8, link 20 us, 12.5 GB/s" in next(MOCKED_WORLD.announce(RunFacts(args, config, None)))
    with mocked_world_of(args, config):
        assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 8, "mock")
        assert is_mocked(parsed(*MOCK)[0])  # Megatron parses again
    assert not dist.is_initialized()


def test_mock_leaves_other_backends_to_megatron(parsed):
    args, config = parsed("--distributed-backend", "gloo")
    MOCKED_WORLD.check_arguments(args, config)
    with ExitStack() as stack:
        MOCKED_WORLD.enter(RunFacts(args, config, None), stack)
        assert not dist.is_initialized()


def test_mock_link_needs_the_mock_backend(parsed):
    with pytest.raises(UsageError, match=r"--lancet-mock-link .*pass --distributed-backend mock, or drop it"):
        MOCKED_WORLD.check_arguments(*parsed("--lancet-mock-link", "20:25"))


def test_groups_inside_a_node_have_a_link_of_their_own(parsed):
    nodes = ("--lancet-ranks-per-node", 4, "--lancet-mock-node-link", "0:200")
    args, config = parsed(*MOCK, *nodes, "--lancet-mock-link", "1e12:25", WORLD_SIZE="8")
    MOCKED_WORLD.check_arguments(args, config)
    (line,) = MOCKED_WORLD.announce(RunFacts(args, config, None))
    assert "link 1e+12 us, 25 GB/s (0 us, 200 GB/s inside a node)" in line
    with mocked_world_of(args, config):
        inside, between = dist.new_group([0, 1, 2, 3]), dist.new_group([0, 4])
        dist.barrier(inside)  # returns
        assert not dist.barrier(between, async_op=True).is_completed()
    with pytest.raises(
        UsageError, match=r"--lancet-mock-node-link is the link inside a node: also pass --lancet-ranks-per-"
    ):
        MOCKED_WORLD.check_arguments(*parsed(*MOCK, *nodes[2:]))
    with pytest.raises(UsageError, match=r"--lancet-mock-node-link .*pass --distributed-backend mock, or drop it"):
        MOCKED_WORLD.check_arguments(*parsed(*nodes))


def test_faulty_mock_link_is_refused(parsed):
    with pytest.raises(UsageError, match=r"--lancet-mock-link: expected LATENCY_US:GBYTES_PER_S.*got '20'") as refusal:
        parsed(*MOCK, "--lancet-mock-link", "20")
    assert "did you mean" not in str(refusal.value)


@pytest.mark.parametrize("environment", [{"RANK": "1", "WORLD_SIZE": "8"}, {"RANK": "0", "LOCAL_WORLD_SIZE": "2"}])
def test_mock_run_refuses_several_processes(parsed, environment):
    with pytest.raises(UsageError, match="start it without torchrun"):
        MOCKED_WORLD.check_arguments(*parsed(*MOCK, **environment))


@pytest.mark.parametrize(
    "words",
    [
        ["--tensor-model-parallel-size", 2],
        ["--expert-tensor-parallel-size", 2],
        ["--context-parallel-size", 2],
        ["--pipeline-model-parallel-size", 2],
        ["--moe-token-dispatcher-type", "allgather"],
        ["--use-distributed-optimizer"],
        ["--use-megatron-fsdp"],
        ["--save", "somewhere"],
        ["--load", "somewhere"],
        ["--tensorboard-dir", "somewhere"],
    ],
    ids=lambda words: words[0],
)
def test_mock_refuses_flags_that_it_cannot_imitate(parsed, words):
    args, config = parsed(*MOCK, *ALL_TO_ALL, *words, WORLD_SIZE="8")
    with pytest.raises(
        UsageError, match=rf"{words[0]}( \w+)? does not work with --distributed-backend mock: .*Change it"
    ):
        MOCKED_WORLD.check_arguments(args, config)
    args.distributed_backend = "gloo"
    MOCKED_WORLD.check_arguments(args, config)
