"""Two hops of a message, between nodes and inside a node, each with a transport of its own.

Legend: P ranks of an expert-parallel group on N nodes, L = P / N of them on each, V ranks that hold the parts of the
same experts (expert tensor parallel size). First hop: from a rank to the ranks with the same place on the other nodes,
N ranks in all. Second hop: between the ranks of a node, L * V in all. The two have connections (communicators and
streams) of their own, so messages of both are on the way at the same time; all ranks launch the messages of each in the
plan's order.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_lancet.runtime.peers import Peers
from megatron_lancet.runtime.transport.base import Transport
from megatron_lancet.schedule.nodes import Nodes


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
        by_kind: the connections of a kind of message.
    """

    nodes: Nodes
    by_kind: Mapping[str, Hop]
