"""``--distributed-backend mock``: Megatron's training in one process, as rank 0 of a mocked world."""

import argparse
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

from megatron_lancet.config import LancetConfig
from megatron_lancet.errors import UsageError
from megatron_lancet.feature import Feature, RunFacts, message_sms
from megatron_lancet.flags import CheckedFlags, flag
from megatron_lancet.testkit.mock.link import Link
from megatron_lancet.testkit.mock.mock_group import BACKEND
from megatron_lancet.testkit.mock.mock_world import MockedNodes, mock_world
from megatron_lancet.testkit.mock.paced_link import NUM_SMS
from megatron_lancet.training.megatron.mock_patches import megatron_in_mocked_world
from megatron_lancet.training.platform.launcher import FLAG as NODES_FLAG
from megatron_lancet.training.platform.launcher import given_ranks_per_node, is_mocked

_BACKEND_FLAG = "--distributed-backend"
_LINK_FLAG = "--lancet-mock-link"
_NODE_LINK_FLAG = "--lancet-mock-node-link"
_ONLY_OWN_SCRIPT = ": other scripts mock no ranks. Drop it."


def _link(flag_name: str, text: str) -> Link:
    try:
        return Link.parse(text)
    except ValueError as error:
        raise UsageError(f"{flag_name}: {error}") from None


@dataclass(frozen=True)
class MockFlags(CheckedFlags):
    """The links of a mocked world."""

    mock_link: Link | None = flag(
        None,
        read=partial(_link, _LINK_FLAG),
        metavar="LATENCY_US:GBYTES_PER_S",
        unchecked="",
        not_with_spec=_ONLY_OWN_SCRIPT,
        help=f"with {_BACKEND_FLAG} {BACKEND}: what each message costs on the wire, for example 20:25 "
        "(20 microseconds, 25e9 bytes per second). By default messages are free.",
    )
    mock_node_link: Link | None = flag(
        None,
        read=partial(_link, _NODE_LINK_FLAG),
        metavar="LATENCY_US:GBYTES_PER_S",
        unchecked="",
        not_with_spec=_ONLY_OWN_SCRIPT,
        help=f"the same for messages between ranks of a node, with {NODES_FLAG}. By default as {_LINK_FLAG}.",
    )


class MockedWorld(Feature):
    """``--distributed-backend mock``."""

    name = "mock"
    flags = MockFlags

    def change_parser(self, parser: argparse.ArgumentParser) -> None:
        """Adds the backend to Megatron's."""
        _add_backend(parser)

    def check_arguments(self, args: argparse.Namespace, config: LancetConfig) -> None:
        """Refuses a world that can't be mocked, and settings that would make its collectives meaningless."""
        links = config.of(MockFlags)
        if not is_mocked(args):
            for name, link in ((_LINK_FLAG, links.mock_link), (_NODE_LINK_FLAG, links.mock_node_link)):
                if link is not None:
                    raise UsageError(
                        f"{name} is the link of a mocked world: pass {_BACKEND_FLAG} {BACKEND}, or drop it."
                    )
            return
        if args.rank != 0 or int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1:
            raise UsageError(
                f"{_BACKEND_FLAG} {BACKEND} plays all ranks in one process: start it without torchrun, with "
                "WORLD_SIZE set to the number of ranks to play and RANK=0 or unset."
            )
        if links.mock_node_link is not None and given_ranks_per_node(config) is None:
            raise UsageError(f"{_NODE_LINK_FLAG} is the link inside a node: also pass {NODES_FLAG} N, or drop it.")
        for name, reason in _unsupported(args):
            raise UsageError(
                f"{name} does not work with {_BACKEND_FLAG} {BACKEND}: {reason}. Change it, or run on real ranks."
            )

    def announce(self, facts: RunFacts) -> Iterator[str]:
        """Yields a line on the world."""
        if is_mocked(facts.args):
            yield f"world: {_description(facts.args, facts.config.of(MockFlags))}"

    def enter(self, facts: RunFacts, stack: ExitStack) -> None:
        """Mocks the world of the run. Megatron initialises ``torch.distributed`` only if it is not initialised yet."""
        if is_mocked(facts.args):
            stack.enter_context(mocked_world_of(facts.args, facts.config))


def _add_backend(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    backend = parser._option_string_actions[_BACKEND_FLAG]
    assert backend.choices is not None
    backend.choices = (*backend.choices, BACKEND)
    return parser


def _unsupported(args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Flags of the run that the mock does not support, each with the reason."""
    sizes = {
        "--tensor-model-parallel-size": args.tensor_model_parallel_size,
        "--expert-tensor-parallel-size": args.expert_tensor_parallel_size,
        "--context-parallel-size": args.context_parallel_size,
        "--pipeline-model-parallel-size": args.pipeline_model_parallel_size,
    }
    parts = "its ranks hold different parts of a tensor, and the mock's collectives act as if all held the same"
    sends = "the mock has no sends from one rank to the next"
    for name, size in sizes.items():
        if (size or 1) > 1:
            yield f"{name} {size}", sends if "pipeline" in name else parts
    dispatcher = args.moe_token_dispatcher_type
    if args.expert_model_parallel_size > 1 and dispatcher != "alltoall":
        reason = "it gathers the rows of all ranks, and the mock has only this one's; pass alltoall"
        yield f"--moe-token-dispatcher-type {dispatcher}", reason
    sharded = "each rank keeps a part of the weights, and the mock would gather N copies of the first"
    checkpoint = "it would write or read the shards of ranks that don't exist"
    last_rank = "Megatron writes it on the last rank, which does not exist"
    for name, given, reason in (
        ("--use-distributed-optimizer", args.use_distributed_optimizer, sharded),
        ("--optimizer dist_muon", str(args.optimizer).startswith("dist_"), sharded),
        ("--use-megatron-fsdp", args.use_megatron_fsdp, sharded),
        ("--use-torch-fsdp2", args.use_torch_fsdp2, sharded),
        ("--save", args.save, checkpoint),
        ("--load", args.load, checkpoint),
        ("--pretrained-checkpoint", args.pretrained_checkpoint, checkpoint),
        ("--tensorboard-dir", args.tensorboard_dir, last_rank),
        ("--wandb-project", args.wandb_project, last_rank),
    ):
        if given:
            yield name, reason


@contextmanager
def mocked_world_of(args: argparse.Namespace, config: LancetConfig) -> Iterator[None]:
    """Inside the context the world of the run is mocked."""
    links = config.of(MockFlags)
    timeout = timedelta(minutes=args.distributed_timeout_minutes)
    inside, link = links.mock_node_link, links.mock_link or Link()
    nodes = None
    if inside is not None:
        per_node = given_ranks_per_node(config)
        assert per_node is not None
        nodes = MockedNodes(per_node, inside)
    mocked = mock_world(args.world_size, link, timeout, nodes, message_sms(config) or NUM_SMS)
    with megatron_in_mocked_world(_add_backend), mocked:
        yield


def _description(args: argparse.Namespace, links: MockFlags) -> str:
    inside = "" if links.mock_node_link is None else f" ({links.mock_node_link} inside a node)"
    return (
        f"mocked: this process plays rank 0 of {args.world_size}, link {links.mock_link or Link()}{inside}. "
        "All-to-alls return what was sent and all ranks count as having this one's data: losses and throughput are "
        "of the mocked world."
    )


MOCKED_WORLD = MockedWorld()
