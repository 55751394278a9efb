"""Starts all-to-alls that run beside compute, on gloo and on NCCL.

Legend: P = number of ranks in the expert-parallel group, Q = in the group that exchanges counts, N / M = rows sent /
received, e = number of experts per rank.
"""

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from megatron_lancet.runtime.comm_stats import CommStats, EventPair


class Transfer(Protocol):
    """One all-to-all that is on its way."""

    def done(self) -> bool:
        """Whether it has certainly completed; never blocks."""

    def wait(self) -> None:
        """Makes what compute does next see the received rows. Raises RuntimeError when a peer is gone."""


class Transport(Protocol):
    """Moves rows between the ranks of one expert-parallel group."""

    def start(
        self, received: torch.Tensor, sent: torch.Tensor, receive_rows: Sequence[int], send_rows: Sequence[int]
    ) -> Transfer:
        """Starts an all-to-all.

        Args:
            received: [M, ...] contiguous, filled by the time that the transfer was waited for.
            sent: [N, ...] contiguous, rows ordered by destination rank; not to be changed until then.
            receive_rows: rows from each of the P ranks, sums to M.
            send_rows: rows to each of the P ranks, sums to N.
        """

    def exchange_counts(self, counts: torch.Tensor) -> "CountsTransfer":
        """Starts the exchange of token counts: [Q * e], for each rank its experts', in rank order."""


class CountsTransfer(Protocol):
    """Token counts that are on their way."""

    def wait(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Sent and received counts on the host: both [Q, e], by peer and by that peer's (own) expert."""


class _WorksTransfer:
    """Several gloo collectives that make up one transfer; knows when the last of them finished."""

    def __init__(self, works: list[dist.Work], buffers: tuple[torch.Tensor, ...], stats: CommStats) -> None:
        self._works = works
        self._buffers = buffers  # gloo reads and writes them until the wait
        self._stats = stats
        self._start_s = time.perf_counter()
        self._finished_s: list[float] = []
        for work in works:
            work.get_future().add_done_callback(lambda _: self._finished_s.append(time.perf_counter()))

    def done(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        with self._stats.waiting("exposed_ms"):
            for work in self._works:
                work.wait()
        # A callback may come a moment after the wait returned; then the transfer finished about now.
        all_seen = len(self._finished_s) == len(self._works)
        finished_s = max(self._finished_s) if all_seen else time.perf_counter()
        self._stats.add("all_to_all_ms", (finished_s - self._start_s) * 1e3)
        self._buffers = ()


class _GlooCounts:
    def __init__(self, sent: torch.Tensor, group: dist.ProcessGroup, stats: CommStats) -> None:
        self._sent = sent
        self._received = torch.empty_like(sent)
        self._stats = stats
        self._num_ranks = group.size()
        self._work = dist.all_to_all_single(self._received, sent, group=group, async_op=True)

    def wait(self) -> tuple[torch.Tensor, torch.Tensor]:
        with self._stats.waiting("counts_exposed_ms"):
            self._work.wait()
        return self._sent.view(self._num_ranks, -1), self._received.view(self._num_ranks, -1)


class PerSenderTransport:
    """gloo transport with one process group, that is one set of connections, per sender.

    gloo's own all-to-all uses one connection per pair of ranks for both directions: when ranks are a few
    milliseconds apart, one direction waits for the other and the exchange takes twice as long. With connections
    of its own, each rank's sends start when they are ready. Counts have a group of their own too, so that they
    don't wait behind payload in a connection.

    Destroy the process groups before the process ends: gloo's threads report back to Python, and one that does so
    while the interpreter shuts down ends the process by abort.
    """

    def __init__(
        self, ep_group: dist.ProcessGroup, counts_group: dist.ProcessGroup, stats: CommStats, timeout: timedelta
    ) -> None:
        """Creates the process groups: collective over all ranks of the world, not only those of the two groups."""
        self._rank = ep_group.rank()
        self._num_ranks = ep_group.size()
        self._stats = stats
        self._sender_groups = _gloo_groups_like(ep_group, self._num_ranks, timeout)
        (self._counts_group,) = _gloo_groups_like(counts_group, 1, timeout)

    def start(
        self, received: torch.Tensor, sent: torch.Tensor, receive_rows: Sequence[int], send_rows: Sequence[int]
    ) -> Transfer:
        nothing = [0] * self._num_ranks
        no_rows = sent[:0]
        works = []
        for sender, rows in enumerate(received.split(list(receive_rows))):
            from_sender = list(nothing)
            from_sender[sender] = receive_rows[sender]
            own = sender == self._rank
            works.append(
                dist.all_to_all_single(
                    rows,
                    sent if own else no_rows,
                    from_sender,
                    list(send_rows) if own else nothing,
                    group=self._sender_groups[sender],
                    async_op=True,
                )
            )
        return _WorksTransfer(works, (received, sent), self._stats)

    def exchange_counts(self, counts: torch.Tensor) -> CountsTransfer:
        return _GlooCounts(counts, self._counts_group, self._stats)


def _gloo_groups_like(group: dist.ProcessGroup, copies: int, timeout: timedelta) -> list[dist.ProcessGroup]:
    """``copies`` new gloo groups with the ranks of ``group``; all ranks of the world create all of them."""
    own_ranks = dist.get_process_group_ranks(group)
    rank_lists: list[list[int] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(rank_lists, own_ranks)
    mine: list[dist.ProcessGroup] = []
    for ranks in sorted({tuple(ranks) for ranks in rank_lists if ranks is not None}):
        for _ in range(copies):
            created = dist.new_group(list(ranks), timeout=timeout, backend="gloo")
            if list(ranks) == own_ranks:
                mine.append(created)
    return mine


class GroupTransport:
    """One asynchronous all-to-all of the group itself per message: for backends that need no help to overlap."""

    def __init__(self, ep_group: dist.ProcessGroup, stats: CommStats) -> None:
        self._group = ep_group
        self._stats = stats

    def start(
        self, received: torch.Tensor, sent: torch.Tensor, receive_rows: Sequence[int], send_rows: Sequence[int]
    ) -> Transfer:
        work = dist.all_to_all_single(
            received, sent, list(receive_rows), list(send_rows), group=self._group, async_op=True
        )
        return _WorksTransfer([work], (received, sent), self._stats)

    def exchange_counts(self, counts: torch.Tensor) -> CountsTransfer:
        return _GlooCounts(counts, self._group, self._stats)


class _StreamTransfer:
    """An all-to-all on the communication stream."""

    def __init__(self, times: EventPair, buffers: tuple[torch.Tensor, ...], stats: CommStats) -> None:
        self._times = times
        self._buffers = buffers  # allocated on the compute stream: not to be reused before it waited
        self._stats = stats

    def done(self) -> bool:
        return self._times.end.query()

    def wait(self) -> None:
        with self._stats.waiting("exposed_ms"):
            torch.cuda.current_stream().wait_event(self._times.end)
        self._stats.add_later("all_to_all_ms", self._times)
        self._buffers = ()


class _StreamCounts:
    """Counts that go over NCCL and then to pinned host memory, without stopping the host."""

    def __init__(
        self, sent: torch.Tensor, group: dist.ProcessGroup, stream: torch.cuda.Stream, stats: CommStats
    ) -> None:
        self._stats = stats
        self._num_ranks = group.size()
        self._on_device = torch.stack((sent, torch.empty_like(sent)))
        self._on_host = torch.empty(self._on_device.shape, dtype=sent.dtype, pin_memory=True)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            dist.all_to_all_single(self._on_device[1], self._on_device[0], group=group)
            self._on_host.copy_(self._on_device, non_blocking=True)
            self._arrived = stream.record_event()

    def wait(self) -> tuple[torch.Tensor, torch.Tensor]:
        start_s = time.perf_counter()
        self._arrived.synchronize()  # the host needs the figures: they are the shapes of what follows
        self._stats.add("counts_exposed_ms", (time.perf_counter() - start_s) * 1e3)
        sent, received = self._on_host
        return sent.view(self._num_ranks, -1), received.view(self._num_ranks, -1)


class StreamTransport:
    """NCCL transport: collectives in issue order on one stream beside the compute stream."""

    def __init__(self, ep_group: dist.ProcessGroup, counts_group: dist.ProcessGroup, stats: CommStats) -> None:
        self._group = ep_group
        self._counts_group = counts_group
        self._stream = torch.cuda.Stream()
        self._stats = stats

    def start(
        self, received: torch.Tensor, sent: torch.Tensor, receive_rows: Sequence[int], send_rows: Sequence[int]
    ) -> Transfer:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            times = EventPair()
            dist.all_to_all_single(received, sent, list(receive_rows), list(send_rows), group=self._group)
            times.end.record()
        return _StreamTransfer(times, (received, sent), self._stats)

    def exchange_counts(self, counts: torch.Tensor) -> CountsTransfer:
        return _StreamCounts(counts, self._counts_group, self._stream, self._stats)


def make_transport(
    ep_group: dist.ProcessGroup,
    counts_group: dist.ProcessGroup,
    device: torch.device,
    stats: CommStats,
    timeout: timedelta,
) -> Transport:
    """The transport for the device. Collective over all ranks of the world.

    Args:
        ep_group: ranks between which rows travel.
        counts_group: ranks that must know each other's token counts: ``ep_group``, and where experts are cut by
            tensor parallelism, the ranks that hold the other parts of them.
        timeout: how long a rank waits for the others; NCCL keeps the group's own.
    """
    if device.type == "cuda":
        return StreamTransport(ep_group, counts_group, stats)
    if dist.get_backend(ep_group) == "mock":  # of megatron_lancet.testing
        return GroupTransport(ep_group, stats)
    return PerSenderTransport(ep_group, counts_group, stats, timeout)
