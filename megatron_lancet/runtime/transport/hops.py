"""Two hops of a message, between nodes and inside a node, each with a transport of its own.

Legend: P ranks of an expert-parallel group on N nodes, L = P / N of them on each, V ranks that hold the parts of the
same experts (expert tensor parallel size). First hop: from a rank to those with the same place on the other nodes, N
ranks in all. Second hop: between the ranks of a node, L * V in all. The two have connections (communicators and
streams) of their own, so messages of both are on the way at the same time; all ranks launch the messages of each in
the plan's order.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_lancet.runtime.collectives import new_groups
from megatron_lancet.runtime.comm_stats import CommStats
from megatron_lancet.runtime.peers import Peers
from megatron_lancet.runtime.transport.base import Transport
from megatron_lancet.runtime.transport.select import make_transport
from megatron_lancet.schedule.nodes import Nodes
from megatron_lancet.schedule.ops import BETWEEN_NODES, INSIDE_NODE


@dataclass(frozen=True)
class Hop:
    """Connections of one kind of messages.

    Attributes:
        own_rank: this rank's place among those that the transport connects.
        peers: identifies the rank that caused a failure; None leaves it unnamed.
    """

    transport: Transport
    own_rank: int
    peers: Peers | None = None


@dataclass(frozen=True)
class Hops:
    """Connections of two hops.

    Attributes:
        by_kind: those of a kind of message.
    """

    nodes: Nodes
    by_kind: Mapping[str, Hop]


def make_hops(
    nodes: Nodes,
    num_holders: int,
    counts_group: dist.ProcessGroup,
    device: torch.device,
    stats: CommStats,
    timeout: timedelta,
    key_store: dist.Store | None = None,
    like: dist.ProcessGroup | None = None,
) -> Hops:
    """Makes the connections of two hops. Collective over all ranks of the world.

    Args:
        num_holders: V.
        counts_group: the P * V ranks that exchange token counts.
        timeout: time for which a rank waits for the others; NCCL keeps the group's own.
        key_store: store by which ranks find out which of them failed; None leaves it unnamed.
        like: a group whose settings for NCCL the connections get, too; None for NCCL's own.
    """
    world_ranks, own = dist.get_process_group_ranks(counts_group), counts_group.rank()
    by_kind: dict[str, Hop] = {}
    for kinds, places in zip((BETWEEN_NODES, INSIDE_NODE), nodes.hops_of(own, num_holders), strict=True):
        ranks = [world_ranks[place] for place in places]
        (group,) = new_groups(ranks, 1, timeout, like=like)
        transport = make_transport(group, group, device, stats, timeout)
        peers = None if key_store is None else Peers(ranks, dist.get_rank(), key_store, timeout, world_ranks)
        by_kind |= dict.fromkeys(kinds, Hop(transport, group.rank(), peers))
    return Hops(nodes, by_kind)
