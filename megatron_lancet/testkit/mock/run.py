"""``--distributed-backend mock``: Megatron's training in one process, as rank 0 of a mocked world."""

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from megatron_lancet.errors import UsageError
from megatron_lancet.testkit.mock.link import Link
from megatron_lancet.testkit.mock.mock_group import BACKEND
from megatron_lancet.testkit.mock.mock_world import MockedNodes, mock_world
from megatron_lancet.testkit.mock.paced_link import NUM_SMS
from megatron_lancet.training.megatron.mock_patches import megatron_in_mocked_world
from megatron_lancet.training.platform.launcher import FLAG as NODES_FLAG
from megatron_lancet.training.platform.launcher import is_mocked

_BACKEND_FLAG = "--distributed-backend"
_LINK_FLAG = "--lancet-mock-link"
_NODE_LINK_FLAG = "--lancet-mock-node-link"


def add_mock_arguments(parser: argparse.ArgumentParser, group: argparse._ArgumentGroup) -> None:
    """Add the backend to Megatron's parser, and the flags of its links."""
    _add_backend(parser)
    group.add_argument(
        _LINK_FLAG,
        type=_link,
        metavar="LATENCY_US:GBYTES_PER_S",
        help=f"with {_BACKEND_FLAG} {BACKEND}: what each message costs on the wire, for example 20:25 "
        "(20 microseconds, 25e9 bytes per second). By default messages are free.",
    )
    group.add_argument(
        _NODE_LINK_FLAG,
        type=_link,
        metavar="LATENCY_US:GBYTES_PER_S",
        help=f"the same for messages between ranks of a node, with {NODES_FLAG}. By default as {_LINK_FLAG}.",
    )


def _add_backend(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    backend = parser._option_string_actions[_BACKEND_FLAG]
    assert backend.choices is not None
    backend.choices = (*backend.choices, BACKEND)
    return parser


def check_mock_arguments(args: argparse.Namespace) -> None:
    """Raise a UsageError if the world can't be mocked, or a setting would make its collectives meaningless."""
    if not is_mocked(args):
        for flag, link in ((_LINK_FLAG, args.lancet_mock_link), (_NODE_LINK_FLAG, args.lancet_mock_node_link)):
            if link is not None:
                raise UsageError(f"{flag} is the link of a mocked world: pass {_BACKEND_FLAG} {BACKEND}, or drop it.")
        return
    if args.rank != 0 or int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1:
        raise UsageError(
            f"{_BACKEND_FLAG} {BACKEND} plays all ranks in one process: start it without torchrun, with WORLD_SIZE set "
            "to the number of ranks to play and RANK=0 or unset."
        )
    if args.lancet_mock_node_link is not None and args.lancet_ranks_per_node is None:
        raise UsageError(f"{_NODE_LINK_FLAG} is the link inside a node: pass {NODES_FLAG} N, too, or drop it.")
    for flag, reason in _unsupported(args):
        raise UsageError(
            f"{flag} does not work with {_BACKEND_FLAG} {BACKEND}: {reason}. Change it, or run on real ranks."
        )


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
    for flag, size in sizes.items():
        if (size or 1) > 1:
            yield f"{flag} {size}", sends if "pipeline" in flag else parts
    dispatcher = args.moe_token_dispatcher_type
    if args.expert_model_parallel_size > 1 and dispatcher != "alltoall":
        reason = "it gathers the rows of all ranks, and the mock has only this one's; pass alltoall"
        yield f"--moe-token-dispatcher-type {dispatcher}", reason
    sharded = "each rank keeps a part of the weights, and the mock would gather N copies of the first"
    checkpoint = "it would write or read the shards of ranks that don't exist"
    last_rank = "Megatron writes it on the last rank, which does not exist"
    for flag, given, reason in (
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
            yield flag, reason


@contextmanager
def mocked_world_of(args: argparse.Namespace, comm_sms: int | None = None) -> Iterator[None]:
    """Inside the context the world of the run is mocked, if the run asks for it; else Megatron creates the world.

    Megatron initialises ``torch.distributed`` only if it is not initialised yet.

    Args:
        comm_sms: SMs that a message on a GPU may take, at most; None for the mock's own choice.
    """
    if not is_mocked(args):
        yield
        return

    timeout = timedelta(minutes=args.distributed_timeout_minutes)
    inside, link = args.lancet_mock_node_link, args.lancet_mock_link or Link()
    nodes = MockedNodes(args.lancet_ranks_per_node, inside) if inside is not None else None
    mocked = mock_world(args.world_size, link, timeout, nodes, comm_sms or NUM_SMS)
    with megatron_in_mocked_world(_add_backend), mocked:
        yield


def describe_mocked_world(args: argparse.Namespace) -> str:
    """One line for the user."""
    inside = "" if args.lancet_mock_node_link is None else f" ({args.lancet_mock_node_link} inside a node)"
    return (
        f"mocked: this process plays rank 0 of {args.world_size}, link {args.lancet_mock_link or Link()}{inside}. "
        "All-to-alls return what was sent and all ranks count as having this one's data: losses and throughput are "
        "those of the mocked world."
    )


def _link(text: str) -> Link:
    try:
        return Link.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
