"""A transport with the delays of a link of a given rate, for machines without network namespaces."""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from megatron_lancet.runtime.comm_stats import CommStats
from megatron_lancet.runtime.recorder import Point
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
        launch: called when the message has passed the link.
        num_bytes: bytes that leave this rank.
        launched_s: when it was launched here.
        sent: receives the result or the exception of ``launch``.
    """

    launch: Callable[[], Any]
    num_bytes: int
    launched_s: float
    sent: Future[Any]


class PacedWire:
    """A rank's end of a link: sends messages one after another, each after the transfer time of its bytes."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._messages: queue.SimpleQueue[_Message] = queue.SimpleQueue()
        threading.Thread(target=self._send_all, name="paced link", daemon=True).start()

    def send[Sent](self, num_bytes: int, launch: Callable[[], Sent]) -> "tuple[float, Future[Sent]]":
        """Queues a message.

        Args:
            num_bytes: bytes that leave this rank.
            launch: called on another thread after their transfer time.

        Returns:
            When the message was queued, and the future result of ``launch``.
        """
        message = _Message(launch, num_bytes, time.perf_counter(), Future())
        self._messages.put(message)
        return message.launched_s, message.sent

    @torch.no_grad()  # set per thread; messages are launched without autograd
    def _send_all(self) -> None:
        free_s = 0.0
        while True:
            message = self._messages.get()
            free_s = max(free_s, message.launched_s) + message.num_bytes * 8 / self._pace.rate_bps
            time.sleep(max(0.0, free_s - time.perf_counter()))
            try:
                message.sent.set_result(message.launch())
            except Exception as error:  # noqa: BLE001 raised again by the wait for the message
                message.sent.set_exception(error)


class _PacedTransfer:
    def __init__(self, launched_s: float, sent: Future[Transfer], stats: CommStats) -> None:
        self._launched_s = launched_s
        self._sent = sent
        self._stats = stats

    def done(self) -> bool:
        return self._sent.done() and self._sent.result().done()

    def wait(self) -> None:
        with self._stats.waiting("exposed_ms"):
            below = self._sent.result()
        below.wait()
        begin = below.interval()[0]
        assert isinstance(begin, float)
        self._stats.add("all_to_all_ms", (begin - self._launched_s) * 1e3)

    def interval(self) -> tuple[Point, Point]:
        return self._launched_s, self._sent.result().interval()[1]


class PacedTransport(Transport):
    """A transport whose messages pass a paced link first.

    The transport below then moves them through the machine's memory. Token counts,
    which are a few bytes, are not held back.
    """

    launches_in_callback = True

    def __init__(self, below: Transport, rank: int, wire: PacedWire, stats: CommStats) -> None:
        """
        Args:
            rank: of this process in the group.
        """
        self._below = below
        self._rank = rank
        self._wire = wire
        self._stats = stats

    def launch(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        receive_rows: Sequence[int],
        send_rows: Sequence[int],
        ready: ReadyEvent | None = None,
    ) -> Transfer:
        num_rows = sum(send_rows) - send_rows[self._rank]
        num_bytes = num_rows * sent.element_size() * sent.shape[1:].numel()
        below = partial(self._below.launch, received, sent, receive_rows, send_rows, ready)
        return _PacedTransfer(*self._wire.send(num_bytes, below), self._stats)

    def empty_receive(self, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        return self._below.empty_receive(shape, like)

    def exchange_counts(self, count: Callable[[], torch.Tensor], ready: ReadyEvent) -> CountsTransfer:
        return self._below.exchange_counts(count, ready)
