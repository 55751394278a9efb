"""gloo: one process group per sender, so that every rank's sends start when they are ready."""

import os
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_lancet.runtime.comm_stats import CommStats
from megatron_lancet.runtime.transport.base import CountsTransfer, ReadyEvent, Transfer
from megatron_lancet.runtime.transport.works import WorkCounts, WorksTransfer


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

    launches_in_callback = True
    is_local = False

    def __init__(
        self, ep_group: dist.ProcessGroup, counts_group: dist.ProcessGroup, stats: CommStats, timeout: timedelta
    ) -> None:
        """Creates the process groups: collective over all ranks of the world, not only those of the two groups."""
        self._rank = ep_group.rank()
        self._num_ranks = ep_group.size()
        self._stats = stats
        self._sender_groups = _gloo_groups_like(ep_group, self._num_ranks, timeout)
        self._ready_sender_groups = _gloo_groups_like(ep_group, self._num_ranks, timeout)
        (self._counts_group,) = _gloo_groups_like(counts_group, 1, timeout)

    def launch(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        receive_rows: Sequence[int],
        send_rows: Sequence[int],
        ready: ReadyEvent | None = None,
    ) -> Transfer:
        groups = self._sender_groups if ready is None else self._ready_sender_groups
        own_start = sum(send_rows[: self._rank])
        own_end = own_start + send_rows[self._rank]
        none = [0] * self._num_ranks
        works = []
        parts = received.split(list(receive_rows))
        # Receives first: gloo then tells the senders to begin, and that must not queue behind our own rows.
        for sender, rows in enumerate(parts):
            if sender != self._rank:
                from_sender = [number if rank == sender else 0 for rank, number in enumerate(receive_rows)]
                works.append(_exchange(rows, sent[:0], from_sender, none, groups[sender]))
        # One of gloo's threads sends that notice, so it must run before our rows are handed over: where threads share a
        # core, our rows would otherwise be on the link first, and the notice would wait behind them.
        os.sched_yield()
        others = [0 if rank == self._rank else number for rank, number in enumerate(send_rows)]
        # Nobody waits for this one: that would be to wait until the others are ready to receive.
        _exchange(sent[:0], _without(sent, own_start, own_end), none, others, groups[self._rank])
        parts[self._rank].copy_(sent[own_start:own_end])
        return WorksTransfer(works, (received, sent), self._stats)

    def empty_receive(self, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        return like.new_empty(shape)

    def exchange_counts(self, counts: torch.Tensor) -> CountsTransfer:
        return WorkCounts(counts, self._counts_group)


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
