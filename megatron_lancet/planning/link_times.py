"""Measured times of messages."""

from dataclasses import dataclass, field

from megatron_lancet.files.records import OMITTED_AT_DEFAULT
from megatron_lancet.planning.figures import Factor, Ms, Size
from megatron_lancet.schedule.ops import BETWEEN_NODES, INSIDE_NODE, MEMORY_BOUND

Points = tuple[tuple[Size, Ms], ...]
"""(bytes, ms), ascending in bytes."""

WIRES = (0, 1)
"""Messages on one wire wait for each other, and for none on another."""


def wire_of(kind: str) -> int:
    """The wire of a kind of messages: the messages inside a node have one of their own."""
    return int(kind in INSIDE_NODE)


@dataclass(frozen=True)
class LinkTimes:
    """Times of messages, measured between the ranks of a group.

    Attributes:
        all_to_all: (bytes that a rank sends to others, ms until its peers have them), ascending in bytes.
        counts_ms: time of one exchange of token counts.
        all_reduce: (bytes of the reduced tensor, ms), ascending; empty if not measured.
        sends_share_link: True if a rank sends its messages one after the other, independent of other ranks (gloo, a
            group per sender); False if a collective occupies all ranks from the last one's start (NCCL).
        compute_slowdown: factor by which matrix products are slower while a message is in flight, at least 1.
        memory_slowdown: the same for ops that mostly move rows; None if it was not measured apart.
        queued: (bytes, ms by which a message arrives after the message in front of it), ascending in bytes; empty
            if that is the time of a message alone. It excludes the latency, and the burst of a link after a rest.
        dispatches_apart: True if forward dispatches have connections of their own, so that they share the link with
            other messages in equal parts; False if all messages are sent one after the other.
        host_polls: True if the host sees when a message has arrived, so that it decides meanwhile what runs; False if
            it enqueues work for a device and runs ahead of it (CUDA).
        between_nodes: like ``all_to_all``, for the first of two hops: bytes that a rank sends to other nodes while all
            ranks of its node do so. Empty if it was not measured, as for the following.
        between_nodes_queued: like ``queued``, for the first of two hops.
        inside_node: like ``all_to_all``, for the second of two hops, inside a node.
        inside_node_queued: like ``queued``, for the second of two hops.
        launch_ms: time of the host to launch a message on a device; 0 where the host sends it.
    """

    all_to_all: Points
    counts_ms: Ms
    all_reduce: Points = ()
    sends_share_link: bool = True
    compute_slowdown: Factor = 1.0
    queued: Points = ()
    dispatches_apart: bool = False
    host_polls: bool = True
    memory_slowdown: Factor | None = None
    between_nodes: Points = ()
    between_nodes_queued: Points = ()
    inside_node: Points = ()
    inside_node_queued: Points = ()
    launch_ms: Ms = field(default=0.0, metadata=OMITTED_AT_DEFAULT)

    def all_to_all_of(self, kind: str) -> Points:
        """``all_to_all`` for a kind of message: its hop's times, if it belongs to two hops."""
        if kind in BETWEEN_NODES:
            return self.between_nodes
        return self.inside_node if kind in INSIDE_NODE else self.all_to_all

    def slowdown(self, kind: str) -> float:
        """Factor by which an op is slower while a message is in flight.

        Args:
            kind: kind of the op; the name of a weight for a weight gradient.
        """
        if self.memory_slowdown is None or kind not in MEMORY_BOUND:
            return self.compute_slowdown
        return self.memory_slowdown
