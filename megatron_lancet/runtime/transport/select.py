"""Selects the transport for a device and a group of ranks, and makes the connections of two hops."""

from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_lancet.runtime.collectives import new_groups
from megatron_lancet.runtime.comm_stats import CommStats
from megatron_lancet.runtime.peers import Peers
from megatron_lancet.runtime.transport.base import Transport
from megatron_lancet.runtime.transport.gloo import PerSenderTransport
from megatron_lancet.runtime.transport.group import GroupTransport
from megatron_lancet.runtime.transport.hops import Hop, Hops
from megatron_lancet.runtime.transport.local import LocalTransport
from megatron_lancet.runtime.transport.nccl import StreamTransport
from megatron_lancet.schedule.nodes import Nodes
from megatron_lancet.schedule.ops import BETWEEN_NODES, INSIDE_NODE


def make_transport(
    ep_group: dist.ProcessGroup,
    counts_group: dist.ProcessGroup,
    device: torch.device,
    stats: CommStats,
    timeout: timedelta,
) -> Transport:
    """Returns the transport for the device. Collective over all ranks of the world.

    Args:
        ep_group: ranks that exchange rows.
        counts_group: ranks that exchange token counts: ``ep_group``, and with expert tensor parallelism also the ranks
            that hold the other parts of the experts.
        timeout: time for which a rank waits for the others; NCCL keeps the group's own.
    """
    if device.type == "cuda":
        return StreamTransport(ep_group, counts_group, stats)
    if dist.get_backend(ep_group) == "mock":  # of megatron_lancet.testkit.mock
        return GroupTransport(ep_group, stats)
    if counts_group.size() == 1:
        return LocalTransport()
    return PerSenderTransport(ep_group, counts_group, stats, timeout)


def make_hops(
    nodes: Nodes,
    expert_tp_size: int,
    counts_group: dist.ProcessGroup,
    device: torch.device,
    stats: CommStats,
    timeout: timedelta,
    key_store: dist.Store | None = None,
    like: dist.ProcessGroup | None = None,
) -> Hops:
    """Makes the connections of two hops. Collective over all ranks of the world.

    Args:
        expert_tp_size: V.
        counts_group: the P * V ranks that exchange token counts.
        timeout: time for which a rank waits for the others; NCCL keeps the group's own.
        key_store: store by which ranks find out which of them failed; None leaves it unnamed.
        like: a group whose settings for NCCL the connections also get; None for NCCL's own.
    """
    world_ranks, own = dist.get_process_group_ranks(counts_group), counts_group.rank()
    by_kind: dict[str, Hop] = {}
    for kinds, places in zip((BETWEEN_NODES, INSIDE_NODE), nodes.hops_of(own, expert_tp_size), strict=True):
        ranks = [world_ranks[place] for place in places]
        (group,) = new_groups(ranks, 1, timeout, like=like)
        transport = make_transport(group, group, device, stats, timeout)
        peers = None if key_store is None else Peers(ranks, dist.get_rank(), key_store, timeout, world_ranks)
        by_kind |= dict.fromkeys(kinds, Hop(transport, group.rank(), peers))
    return Hops(nodes, by_kind)
