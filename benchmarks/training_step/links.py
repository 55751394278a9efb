"""The two links as the model sees them, and how stock modules are sent over the same transport as ours."""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

from benchmarks.training_step.megatron_overlap import ThreadedStats
from benchmarks.training_step.stock_messages import StockMessages
from megatron_lancet.runtime.transport.base import CountsTransfer, ReadyEvent, Transfer, Transport
from megatron_lancet.runtime.transport.hops import Hop, Hops
from megatron_lancet.runtime.transport.select import make_hops, make_transport
from megatron_lancet.schedule.nodes import Nodes
from megatron_lancet.schedule.ops import BETWEEN_NODES, INSIDE_NODE

CPU = torch.device("cpu")


@contextmanager
def groups_on(interface: str) -> Iterator[None]:
    """Groups of gloo's that are made inside the context talk over ``interface``; it is read when a group is made."""
    previous = os.environ["GLOO_SOCKET_IFNAME"]
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    try:
        yield
    finally:
        os.environ["GLOO_SOCKET_IFNAME"] = previous


class _BytesBetweenNodes:
    """Bytes of rows that this rank sent to other nodes. Messages are launched on several threads."""

    def __init__(self) -> None:
        self._bytes = 0
        self._lock = threading.Lock()

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self._bytes += num_bytes

    def take(self) -> int:
        with self._lock:
            taken, self._bytes = self._bytes, 0
        return taken


class _Counted(Transport):
    """A transport whose bytes to other nodes are counted."""

    def __init__(self, transport: Transport, is_elsewhere: Sequence[bool], counted: _BytesBetweenNodes) -> None:
        """
        Args:
            is_elsewhere: of each rank that ``transport`` connects, whether it is on another node.
        """
        self._transport = transport
        self._is_elsewhere = is_elsewhere
        self._counted = counted
        self.launches_in_callback = transport.launches_in_callback
        self.is_local = transport.is_local

    def launch(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        receive_rows: Sequence[int],
        send_rows: Sequence[int],
        ready: ReadyEvent | None = None,
    ) -> Transfer:
        rows = sum(number for number, leaves in zip(send_rows, self._is_elsewhere, strict=True) if leaves)
        self._counted.add(rows * sent.element_size() * sent.shape[1:].numel())
        return self._transport.launch(received, sent, receive_rows, send_rows, ready)

    def empty_receive(self, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        return self._transport.empty_receive(shape, like)

    def exchange_counts(self, count: Callable[[], torch.Tensor], ready: ReadyEvent) -> CountsTransfer:
        return self._transport.exchange_counts(count, ready)


class Link:
    """A transport, connections of two hops and a group for stock's counts, all on one interface.

    Ranks of a node talk to each other also by the address of that interface, but these messages do not leave by it.

    Attributes:
        stats: what was sent over it, and how long compute waited for it.
        hops: connections of two hops; None if a node has one rank.
        ranks_per_node: ranks of the expert-parallel group on each node.
    """

    def __init__(
        self, interface: str, ep_group: dist.ProcessGroup, timeout: timedelta, nodes: Nodes | None = None
    ) -> None:
        """Collective over all ranks of the world.

        Args:
            ep_group: expert-parallel group, of all ranks.
            nodes: how these lie on nodes; None if each has one of its own.
        """
        self.interface = interface
        self.stats = ThreadedStats(CPU)
        self.hops: Hops | None = None
        self._ep_group = ep_group
        self._sent = _BytesBetweenNodes()
        self.ranks_per_node = 1 if nodes is None else nodes.ranks_per_node
        own_node = ep_group.rank() // self.ranks_per_node
        self._is_elsewhere = [rank // self.ranks_per_node != own_node for rank in range(ep_group.size())]
        with groups_on(interface):
            transport = make_transport(ep_group, ep_group, CPU, self.stats, timeout)
            self.transport = _Counted(transport, self._is_elsewhere, self._sent)
            if nodes is not None:
                self.hops = self._counted_hops(make_hops(nodes, 1, ep_group, CPU, self.stats, timeout))
            self._counts_group = dist.new_group(backend="gloo", timeout=timeout)

    def _counted_hops(self, hops: Hops) -> Hops:
        places = hops.nodes.hops_of(self._ep_group.rank())
        by_kind: dict[str, Hop] = {}
        for kinds, ranks in zip((BETWEEN_NODES, INSIDE_NODE), places, strict=True):
            is_elsewhere = [self._is_elsewhere[rank] for rank in ranks]
            hop = next(hops.by_kind[kind] for kind in kinds)
            counted = replace(hop, transport=_Counted(hop.transport, is_elsewhere, self._sent))
            by_kind |= dict.fromkeys(kinds, counted)
        return replace(hops, by_kind=by_kind)

    def take_sent_bytes(self) -> int:
        """Bytes of rows that this rank sent to other nodes since the last call."""
        return self._sent.take()

    def carries_stock(self) -> AbstractContextManager[None]:
        """Inside, stock's all-to-alls and its count exchange use this link, and are counted and timed.

        Every all-to-all takes the transport that ours take, and is waited for at once.
        """
        return StockMessages(self.stats, lambda: (self.transport, self._counts_group)).sent()


def sent_bytes(interface: str) -> int:
    """Bytes that left ``interface`` of this process's network namespace since it was made."""
    with open("/proc/self/net/dev") as table:  # noqa: PTH123
        for line in table:
            name, _, counters = line.partition(":")
            if name.strip() == interface:
                return int(counters.split()[8])
    raise RuntimeError(f"this network namespace has no interface {interface}")
