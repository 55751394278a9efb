"""A transport that takes as long as a link of a given rate, for machines that allow no network namespaces."""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from megatron_lancet.runtime.comm_stats import CommStats
from megatron_lancet.runtime.trace import Point
from megatron_lancet.runtime.transport.base import CountsTransfer, ReadyEvent, Transfer, Transport


@dataclass
class Pace:
    """The rate of a link, which may change between two steps.

    Attributes:
        rate_bps: bits per second.
    """

    rate_bps: float


@dataclass(frozen=True)
class _Message:
    """A message that waits for its turn on the link.

    Attributes:
        launch: hands it to the transport below.
        num_bytes: bytes that leave this rank.
        launched_s: when it was launched here.
        sent: receives the transfer of the transport below, or what its launch raised.
    """

    launch: Callable[[], Transfer]
    num_bytes: int
    launched_s: float
    sent: Future[Transfer]


class _PacedTransfer:
    def __init__(self, message: _Message, stats: CommStats) -> None:
        self._message = message
        self._stats = stats

    def done(self) -> bool:
        sent = self._message.sent
        return sent.done() and sent.result().done()

    def wait(self) -> None:
        with self._stats.waiting("exposed_ms"):
            below = self._message.sent.result()
        below.wait()
        begin = below.interval()[0]
        assert isinstance(begin, float)
        self._stats.add("all_to_all_ms", (begin - self._message.launched_s) * 1e3)

    def interval(self) -> tuple[Point, Point]:
        return self._message.launched_s, self._message.sent.result().interval()[1]


class PacedTransport(Transport):
    """Messages leave a rank one after the other, each when its bytes would have passed a link of the given rate.

    They are handed to the transport below at that time, which moves them through the machine's memory. Token counts,
    which are a few bytes, are not held back.
    """

    launches_in_callback = True

    def __init__(self, below: Transport, rank: int, pace: Pace, stats: CommStats) -> None:
        """
        Args:
            rank: of this process in the group.
        """
        self._below = below
        self._rank = rank
        self._pace = pace
        self._stats = stats
        self._messages: queue.SimpleQueue[_Message] = queue.SimpleQueue()
        threading.Thread(target=self._send_all, name="paced link", daemon=True).start()

    def launch(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        receive_rows: Sequence[int],
        send_rows: Sequence[int],
        ready: ReadyEvent | None = None,
    ) -> Transfer:
        num_rows = sum(send_rows) - send_rows[self._rank]
        message = _Message(
            launch=lambda: self._below.launch(received, sent, receive_rows, send_rows, ready),
            num_bytes=num_rows * sent.element_size() * sent.shape[1:].numel(),
            launched_s=time.perf_counter(),
            sent=Future(),
        )
        self._messages.put(message)
        return _PacedTransfer(message, self._stats)

    def empty_receive(self, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        return self._below.empty_receive(shape, like)

    def exchange_counts(self, count: Callable[[], torch.Tensor], ready: ReadyEvent) -> CountsTransfer:
        return self._below.exchange_counts(count, ready)

    @torch.no_grad()  # a setting of each thread; messages are launched without autograd
    def _send_all(self) -> None:
        free_s = 0.0
        while True:
            message = self._messages.get()
            free_s = max(free_s, message.launched_s) + message.num_bytes * 8 / self._pace.rate_bps
            time.sleep(max(0.0, free_s - time.perf_counter()))
            try:
                message.sent.set_result(message.launch())
            except Exception as error:  # noqa: BLE001 raised again where the message is waited for
                message.sent.set_exception(error)
