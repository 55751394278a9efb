"""Transfers made of asynchronous collectives of a process group, for gloo and the mocked group."""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from megatron_lancet.runtime.comm_stats import CommStats
from megatron_lancet.runtime.recorder import Point
from megatron_lancet.runtime.transport.base import TokenCounts


class WorksTransfer:
    """One message made of one or several collectives; complete when the last of them is."""

    def __init__(self, works: list[dist.Work], buffers: tuple[torch.Tensor, ...], stats: CommStats) -> None:
        self._works = works
        self._buffers = buffers  # the collectives read and write them until the wait
        self._stats = stats
        self._start_s = time.perf_counter()
        self._finished_s: list[float] = []
        self._interval = (self._start_s, self._start_s)
        for work in works:
            if work.is_completed():  # on a mocked link that takes no time
                self._finished_s.append(self._start_s)
            else:
                work.get_future().add_done_callback(lambda _: self._finished_s.append(time.perf_counter()))

    def done(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        with self._stats.waiting("exposed_ms"):
            for work in self._works:
                work.wait()
        now_s = time.perf_counter()
        # A callback may run shortly after the wait has returned; then the transfer finished about now.
        all_seen = len(self._finished_s) == len(self._works)
        finished_s = max(self._finished_s, default=now_s) if all_seen else now_s
        self._stats.add("all_to_all_ms", (finished_s - self._start_s) * 1e3)
        self._interval = (self._start_s, finished_s)
        self._buffers = ()

    def interval(self) -> tuple[Point, Point]:
        return self._interval


class WorkCounts:
    """An exchange of token counts on the host."""

    def __init__(self, sent: torch.Tensor, group: dist.ProcessGroup) -> None:
        self._sent = sent
        self._received = torch.empty_like(sent)
        self._num_ranks = group.size()
        self.num_bytes = sent.nbytes - sent.nbytes // self._num_ranks
        self._interval: list[float] = []
        self._future = dist.all_to_all_single(self._received, sent, group=group, async_op=True).get_future()

    def done(self) -> bool:
        # work.is_completed() would be set only after the future's callbacks have run.
        return self._future.done()

    def when_done(self, callback: Callable[[], None]) -> None:
        self._future.add_done_callback(lambda _: callback())

    def watch(self) -> None:
        self._interval = [time.perf_counter()]
        self.when_done(lambda: self._interval.append(time.perf_counter()))

    def interval(self) -> tuple[Point, Point]:
        # Another thread records the end, perhaps a little later.
        return self._interval[0], (self._interval[1] if len(self._interval) > 1 else time.perf_counter())

    def wait_for_own(self) -> list[list[int]]:
        own: list[list[int]] = self._sent.view(self._num_ranks, -1).tolist()
        return own

    def wait(self) -> TokenCounts:
        self._future.wait()
        received = self._received.view(self._num_ranks, -1)
        return TokenCounts(self.wait_for_own(), received.tolist(), received)
