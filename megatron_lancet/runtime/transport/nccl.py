"""NCCL transport: rows in launch order on one stream next to the compute stream, token counts on another.

Both streams have the highest priority: a collective that is launched during a large kernel gets multiprocessors as soon
as blocks of that kernel end, not when all of them have been placed.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from megatron_lancet.runtime.comm_stats import CommStats, EventPair
from megatron_lancet.runtime.recorder import Point
from megatron_lancet.runtime.transport.base import CountsTransfer, ReadyEvent, TokenCounts, Transfer, Transport


class _StreamTransfer:
    """An all-to-all on the communication stream."""

    def __init__(self, times: EventPair, buffers: tuple[torch.Tensor, ...], stats: CommStats) -> None:
        self._times = times
        # Memory of the compute stream, but for a received buffer of ``empty_receive``. Kernels of that stream may reuse
        # what it dropped at once, so nothing is dropped before the stream has waited for the all-to-all.
        self._buffers = buffers
        self._stats = stats

    def done(self) -> bool:
        return self._times.end.query()

    def wait(self) -> None:
        self._stats.wait_event("exposed_ms", self._times.end)
        self._stats.add_later("all_to_all_ms", self._times)
        self._buffers = ()

    def interval(self) -> tuple[Point, Point]:
        return self._times.start, self._times.end


class _StreamCounts:
    """Token counts that are sent over NCCL and copied to pinned host memory, without blocking the host."""

    def __init__(
        self,
        count: Callable[[], torch.Tensor],
        ready: ReadyEvent,
        group: dist.ProcessGroup,
        stream: torch.cuda.Stream,
    ) -> None:
        """
        Args:
            stream: the stream of the counts, on which all of it runs.
        """
        compute = torch.cuda.current_stream()
        self._num_ranks = group.size()
        ready.block(stream)
        with torch.cuda.stream(stream):
            sent = count()
            self.num_bytes = sent.nbytes - sent.nbytes // self._num_ranks
            on_host = torch.empty((2, len(sent)), dtype=sent.dtype, pin_memory=True)
            self._on_host: torch.Tensor | None = on_host
            on_host[0].copy_(sent, non_blocking=True)
            self._times = EventPair()
            self._received = torch.empty_like(sent)
            dist.all_to_all_single(self._received, sent, group=group)
            on_host[1].copy_(self._received, non_blocking=True)
            self._times.end.record()
        self._counts: TokenCounts | None = None
        # Kernels of the compute stream read it. This stream, in whose memory it is, must not reuse it before them.
        self._received.record_stream(compute)

    def done(self) -> bool:
        return self._times.end.query()

    def when_done(self, callback: Callable[[], None]) -> None:
        raise NotImplementedError("CUDA events have no host callback")

    def watch(self) -> None:
        """Does nothing: the events record the times anyway."""

    def interval(self) -> tuple[Point, Point]:
        return self._times.start, self._times.end

    def wait_for_own(self) -> list[list[int]]:
        if self._counts is not None:
            return self._counts.sent
        assert self._on_host is not None
        self._times.start.synchronize()
        own: list[list[int]] = self._on_host[0].view(self._num_ranks, -1).tolist()
        return own

    def wait(self) -> TokenCounts:
        if self._counts is None:
            assert self._on_host is not None
            self._times.end.synchronize()  # the host needs the counts: they are shapes
            sent, received = self._on_host.view(2, self._num_ranks, -1).tolist()
            self._on_host = None  # pinned memory, which the backward would keep until then
            self._counts = TokenCounts(sent, received, self._received.view(self._num_ranks, -1))
        return self._counts


class StreamTransport(Transport):
    """Launches collectives of rows in the order of the calls on one stream, and collectives of counts on another.

    The two streams have communicators of their own. All ranks launch the collectives of both in the same order.
    """

    def __init__(self, ep_group: dist.ProcessGroup, counts_group: dist.ProcessGroup, stats: CommStats) -> None:
        self._group = ep_group
        self._counts_group = counts_group
        # The range is that from the lowest to the highest priority, and a higher one is a smaller number.
        _, highest = torch.cuda.Stream.priority_range()  # type: ignore[call-arg]  # it is static; torch's stub differs
        self._stream = torch.cuda.Stream(priority=highest)
        self._counts_stream = torch.cuda.Stream(priority=highest)
        self._stats = stats

    def launch(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        receive_rows: Sequence[int],
        send_rows: Sequence[int],
        ready: ReadyEvent | None = None,
    ) -> Transfer:
        if ready is None:
            self._stream.wait_stream(torch.cuda.current_stream())
        else:
            ready.block(self._stream)
        with torch.cuda.stream(self._stream):
            times = EventPair()
            dist.all_to_all_single(received, sent, list(receive_rows), list(send_rows), group=self._group)
            times.end.record()
        return _StreamTransfer(times, (received, sent), self._stats)

    def empty_receive(self, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        # The memory is this stream's, which then may write it at once: memory of the compute stream may still be read
        # by kernels that were enqueued behind the point for which the message waits.
        with torch.cuda.stream(self._stream):
            received = like.new_empty(shape)
        # The rows are dropped as soon as the kernel that sorts them has been enqueued. The next message that gets their
        # memory does not wait for that kernel, so it must not get it before the kernel has run.
        received.record_stream(torch.cuda.current_stream())
        return received

    def exchange_counts(self, count: Callable[[], torch.Tensor], ready: ReadyEvent) -> CountsTransfer:
        return _StreamCounts(count, ready, self._counts_group, self._counts_stream)
