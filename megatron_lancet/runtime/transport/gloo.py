"""gloo transport: one process group per sender, so that every rank's sends start when they are ready."""

import os
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_lancet.runtime.collectives import new_groups
from megatron_lancet.runtime.comm_stats import CommStats
from megatron_lancet.runtime.transport.base import CountsTransfer, ReadyEvent, Transfer, Transport
from megatron_lancet.runtime.transport.works import WorkCounts, WorksTransfer


class PerSenderTransport(Transport):
    """Transport over gloo with one process group, that is one set of connections, per sender.

    gloo's own all-to-all uses one connection per pair of ranks for both directions: when ranks are a few milliseconds
    apart, one direction waits for the other and the exchange takes twice as long. With connections of its own, each
    rank's sends start when they are ready. Counts have a separate group, so that they don't queue behind payload. The
    all-to-alls that wait for counts have separate groups too, because they are launched when the counts arrive and not
    at a fixed place among the others.

    Destroy the process groups before the process ends: gloo's threads call back into Python, and a call while the
    interpreter shuts down aborts the process.
    """

    launches_in_callback = True

    def __init__(
        self, ep_group: dist.ProcessGroup, counts_group: dist.ProcessGroup, stats: CommStats, timeout: timedelta
    ) -> None:
        """Creates the process groups: collective over all ranks of the world, not only over the two groups."""
        self._rank = ep_group.rank()
        self._num_ranks = ep_group.size()
        self._stats = stats
        ep_ranks, counts_ranks = map(dist.get_process_group_ranks, (ep_group, counts_group))
        self._sender_groups = new_groups(ep_ranks, self._num_ranks, timeout, "gloo")
        self._ready_sender_groups = new_groups(ep_ranks, self._num_ranks, timeout, "gloo")
        (self._counts_group,) = new_groups(counts_ranks, 1, timeout, "gloo")

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
        # Receives first: gloo notifies the senders to begin, and that notice must not queue behind our local rows.
        for sender, rows in enumerate(parts):
            if sender != self._rank:
                from_sender = [number if rank == sender else 0 for rank, number in enumerate(receive_rows)]
                works.append(_exchange(rows, sent[:0], from_sender, none, groups[sender]))
        # One of gloo's threads sends the notice. If threads share a core, it must run before our rows are handed over:
        # otherwise our rows would be on the link first, and the notice would wait behind them.
        os.sched_yield()
        others = [0 if rank == self._rank else number for rank, number in enumerate(send_rows)]
        # No wait for this one: it would block until the other ranks are ready to receive.
        _exchange(sent[:0], _without(sent, own_start, own_end), none, others, groups[self._rank])
        parts[self._rank].copy_(sent[own_start:own_end])
        return WorksTransfer(works, (received, sent), self._stats)

    def exchange_counts(self, count: Callable[[], torch.Tensor], ready: ReadyEvent) -> CountsTransfer:
        return WorkCounts(count(), self._counts_group)


def _exchange(
    received: torch.Tensor, sent: torch.Tensor, receive_rows: list[int], send_rows: list[int], group: dist.ProcessGroup
) -> dist.Work:
    """Launches an all-to-all, which keeps its tensors alive until it is done."""
    return dist.all_to_all_single(received, sent, receive_rows, send_rows, group=group, async_op=True)


def _without(rows: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """Returns ``rows`` without those from ``start`` to ``end``; copies only if rows remain on both sides."""
    before, after = rows[:start], rows[end:]
    if not len(before) or not len(after):
        return before if len(before) else after
    return torch.cat((before, after))
