"""NCCL transport: collectives in launch order, on one stream next to the compute stream."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from megatron_lancet.runtime.comm_stats import CommStats, EventPair
from megatron_lancet.runtime.trace import Point
from megatron_lancet.runtime.transport.base import CountsTransfer, ReadyEvent, Transfer, Transport


class _StreamTransfer:
    """An all-to-all on the communication stream."""

    def __init__(self, times: EventPair, buffers: tuple[torch.Tensor, ...], stats: CommStats) -> None:
        self._times = times
        self._buffers = buffers  # allocated on the compute stream: not to be reused before it has waited
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
        raise NotImplementedError("CUDA events have no host callback")

    def watch(self) -> None:
        """Does nothing: the events record the times anyway."""

    def interval(self) -> tuple[Point, Point]:
        return self._times.start, self._times.end

    def wait(self) -> tuple[torch.Tensor, torch.Tensor]:
        self._times.end.synchronize()  # the host needs the counts: they are shapes
        sent, received = self._on_host
        return sent.view(self._num_ranks, -1), received.view(self._num_ranks, -1)


class StreamTransport(Transport):
    """Launches collectives in the order of the calls, on one stream next to the compute stream."""

    def __init__(self, ep_group: dist.ProcessGroup, counts_group: dist.ProcessGroup, stats: CommStats) -> None:
        self._group = ep_group
        self._counts_group = counts_group
        self._stream = torch.cuda.Stream()
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
        # Allocated on this stream, which may write it at once: no kernel of the compute stream uses its memory.
        with torch.cuda.stream(self._stream):
            received = like.new_empty(shape)
        received.record_stream(torch.cuda.current_stream())
        return received

    def exchange_counts(self, counts: torch.Tensor) -> CountsTransfer:
        return _StreamCounts(counts, self._counts_group, self._stream)
