"""Starts all-to-alls that run beside compute, on gloo and on NCCL."""

import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_lancet.runtime.comm_stats import CommStats, EventPair
from megatron_lancet.runtime.trace import Point
from megatron_lancet.runtime.transport.base import Armed, CountsTransfer, Transfer, Transport


class _WorksTransfer:
    """Several gloo collectives that make up one transfer; knows when the last of them finished."""

    def __init__(self, works: list[dist.Work], buffers: tuple[torch.Tensor, ...], stats: CommStats) -> None:
        self._works = works
        self._buffers = buffers  # gloo reads and writes them until the wait
        self._stats = stats
        self._start_s = time.perf_counter()
        self._finished_s: list[float] = []
        self._interval = (self._start_s, self._start_s)
        for work in works:
            work.get_future().add_done_callback(lambda _: self._finished_s.append(time.perf_counter()))

    def done(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        with self._stats.waiting("exposed_ms"):
            for work in self._works:
                work.wait()
        now_s = time.perf_counter()
        # A callback may come a moment after the wait returned; then the transfer finished about now.
        all_seen = len(self._finished_s) == len(self._works)
        finished_s = max(self._finished_s, default=now_s) if all_seen else now_s
        self._stats.add("all_to_all_ms", (finished_s - self._start_s) * 1e3)
        self._interval = (self._start_s, finished_s)
        self._buffers = ()

    def interval(self) -> tuple[Point, Point]:
        return self._interval


class _GlooCounts:
    def __init__(self, sent: torch.Tensor, group: dist.ProcessGroup) -> None:
        self._sent = sent
        self._received = torch.empty_like(sent)
        self._num_ranks = group.size()
        self.own_bytes = sent.nbytes // self._num_ranks
        self._interval: list[float] = []
        self._future = dist.all_to_all_single(self._received, sent, group=group, async_op=True).get_future()

    def done(self) -> bool:
        # Not the work's is_completed: that is set only after the future's callbacks have run.
        return self._future.done()

    def when_done(self, callback: Callable[[], None]) -> None:
        self._future.add_done_callback(lambda _: callback())

    def watch(self) -> None:
        self._interval = [time.perf_counter()]
        self.when_done(lambda: self._interval.append(time.perf_counter()))

    def interval(self) -> tuple[Point, Point]:
        # Another thread notes the end, and may not have come to it yet.
        return self._interval[0], (self._interval[1] if len(self._interval) > 1 else time.perf_counter())

    def wait(self) -> tuple[torch.Tensor, torch.Tensor]:
        self._future.wait()
        return self._sent.view(self._num_ranks, -1), self._received.view(self._num_ranks, -1)


class PerSenderTransport:
    """gloo transport with one process group, that is one set of connections, per sender.

    gloo's own all-to-all uses one connection per pair of ranks for both directions: when ranks are a few
    milliseconds apart, one direction waits for the other and the exchange takes twice as long. With connections
    of its own, each rank's sends start when they are ready. Counts have a group of their own too, so that they
    don't wait behind payload in a connection, and so have the all-to-alls that wait for them, which start when counts
    come and not at a fixed place among the others.

    Destroy the process groups before the process ends: gloo's threads report back to Python, and one that does so
    while the interpreter shuts down ends the process by abort.
    """

    leaves_by_itself = True
    is_alone = False

    def __init__(
        self, ep_group: dist.ProcessGroup, counts_group: dist.ProcessGroup, stats: CommStats, timeout: timedelta
    ) -> None:
        """Creates the process groups: collective over all ranks of the world, not only those of the two groups."""
        self._rank = ep_group.rank()
        self._num_ranks = ep_group.size()
        self._stats = stats
        self._sender_groups = _gloo_groups_like(ep_group, self._num_ranks, timeout)
        self._armed_sender_groups = _gloo_groups_like(ep_group, self._num_ranks, timeout)
        (self._counts_group,) = _gloo_groups_like(counts_group, 1, timeout)

    def start(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        receive_rows: Sequence[int],
        send_rows: Sequence[int],
        armed: Armed | None = None,
    ) -> Transfer:
        groups = self._sender_groups if armed is None else self._armed_sender_groups
        own_start = sum(send_rows[: self._rank])
        own_end = own_start + send_rows[self._rank]
        none = [0] * self._num_ranks
        works = []
        parts = received.split(list(receive_rows))
        # Receives first: gloo tells the senders that there is room, and that must not queue behind our own rows.
        for sender, rows in enumerate(parts):
            if sender != self._rank:
                from_sender = [number if rank == sender else 0 for rank, number in enumerate(receive_rows)]
                works.append(_exchange(rows, sent[:0], from_sender, none, groups[sender]))
        # A thread of gloo's says that there is room. It must come to it first: where threads share a core, our own rows
        # would otherwise be on the link before the word that lets the others begin, and it would wait behind them.
        os.sched_yield()
        others = [0 if rank == self._rank else number for rank, number in enumerate(send_rows)]
        # Nobody waits for this one: that would be to wait until the others are ready to receive.
        _exchange(sent[:0], _without(sent, own_start, own_end), none, others, groups[self._rank])
        parts[self._rank].copy_(sent[own_start:own_end])
        return _WorksTransfer(works, (received, sent), self._stats)

    def make_room(self, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        return like.new_empty(shape)

    def exchange_counts(self, counts: torch.Tensor) -> CountsTransfer:
        return _GlooCounts(counts, self._counts_group)


def _exchange(
    received: torch.Tensor,
    sent: torch.Tensor,
    receive_rows: list[int],
    send_rows: list[int],
    group: dist.ProcessGroup,
) -> dist.Work:
    """An all-to-all in the background; it keeps its tensors alive until it is done."""
    return dist.all_to_all_single(received, sent, receive_rows, send_rows, group=group, async_op=True)


def _without(rows: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """``rows`` but for those from ``start`` to ``end``; a copy only where there are some on both sides."""
    before, after = rows[:start], rows[end:]
    if not len(before) or not len(after):
        return before if len(before) else after
    return torch.cat((before, after))


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
    """One asynchronous all-to-all of the group itself per message: on a CPU, for backends that overlap unaided."""

    leaves_by_itself = False
    is_alone = False

    def __init__(self, ep_group: dist.ProcessGroup, stats: CommStats) -> None:
        self._group = ep_group
        self._stats = stats

    def start(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        receive_rows: Sequence[int],
        send_rows: Sequence[int],
        armed: Armed | None = None,
    ) -> Transfer:
        work = _exchange(received, sent, list(receive_rows), list(send_rows), self._group)
        return _WorksTransfer([work], (received, sent), self._stats)

    def make_room(self, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        return like.new_empty(shape)

    def exchange_counts(self, counts: torch.Tensor) -> CountsTransfer:
        return _GlooCounts(counts, self._group)


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

    def interval(self) -> tuple[Point, Point]:
        return self._times.start, self._times.end


class _StreamCounts:
    """Counts that go over NCCL and then to pinned host memory, without stopping the host."""

    def __init__(self, sent: torch.Tensor, group: dist.ProcessGroup, stream: torch.cuda.Stream) -> None:
        self._num_ranks = group.size()
        self.own_bytes = sent.nbytes // self._num_ranks
        self._on_device = torch.stack((sent, torch.empty_like(sent)))
        self._on_host = torch.empty(self._on_device.shape, dtype=sent.dtype, pin_memory=True)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._times = EventPair()
            dist.all_to_all_single(self._on_device[1], self._on_device[0], group=group)
            self._on_host.copy_(self._on_device, non_blocking=True)
            self._times.end.record()

    def done(self) -> bool:
        return self._times.end.query()

    def when_done(self, callback: Callable[[], None]) -> None:
        raise NotImplementedError("nobody tells the host when an event has happened")

    def watch(self) -> None:
        """Its events tell."""

    def interval(self) -> tuple[Point, Point]:
        return self._times.start, self._times.end

    def wait(self) -> tuple[torch.Tensor, torch.Tensor]:
        self._times.end.synchronize()  # the host needs the figures: they are the shapes of what follows
        sent, received = self._on_host
        return sent.view(self._num_ranks, -1), received.view(self._num_ranks, -1)


class StreamTransport:
    """NCCL transport: collectives in issue order on one stream beside the compute stream."""

    leaves_by_itself = False
    is_alone = False

    def __init__(self, ep_group: dist.ProcessGroup, counts_group: dist.ProcessGroup, stats: CommStats) -> None:
        self._group = ep_group
        self._counts_group = counts_group
        self._stream = torch.cuda.Stream()
        self._stats = stats

    def start(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        receive_rows: Sequence[int],
        send_rows: Sequence[int],
        armed: Armed | None = None,
    ) -> Transfer:
        if armed is None:
            self._stream.wait_stream(torch.cuda.current_stream())
        else:
            armed.precedes(self._stream)
        with torch.cuda.stream(self._stream):
            times = EventPair()
            dist.all_to_all_single(received, sent, list(receive_rows), list(send_rows), group=self._group)
            times.end.record()
        return _StreamTransfer(times, (received, sent), self._stats)

    def make_room(self, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        with torch.cuda.stream(self._stream):
            # Allocated there, it may be written at once: no kernel of the compute stream still uses its memory.
            room = like.new_empty(shape)
        room.record_stream(torch.cuda.current_stream())
        return room

    def exchange_counts(self, counts: torch.Tensor) -> CountsTransfer:
        return _StreamCounts(counts, self._counts_group, self._stream)


class _OwnCounts:
    def __init__(self, counts: torch.Tensor) -> None:
        self._counts = counts.view(1, -1)
        self.own_bytes = counts.nbytes

    def done(self) -> bool:
        return True

    def when_done(self, callback: Callable[[], None]) -> None:
        callback()

    def watch(self) -> None:
        raise AssertionError("counts of a single rank don't travel")

    def interval(self) -> tuple[Point, Point]:
        raise AssertionError("counts of a single rank don't travel")

    def wait(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._counts, self._counts


class NoTransport:
    """For a group of one rank on a CPU."""

    leaves_by_itself = True
    is_alone = True

    def start(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        receive_rows: Sequence[int],
        send_rows: Sequence[int],
        armed: Armed | None = None,
    ) -> Transfer:
        raise AssertionError("rows of a single rank don't travel")

    def make_room(self, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        return like.new_empty(shape)

    def exchange_counts(self, counts: torch.Tensor) -> CountsTransfer:
        return _OwnCounts(counts)


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
    if dist.get_backend(ep_group) == "mock":  # of megatron_lancet.mock
        return GroupTransport(ep_group, stats)
    if counts_group.size() == 1:
        return NoTransport()
    return PerSenderTransport(ep_group, counts_group, stats, timeout)
