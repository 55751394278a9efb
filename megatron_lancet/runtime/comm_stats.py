"""Counts the cost of communication: the time that messages were in flight, and the time that compute waited."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass
class CommTimes:
    """Communication of one training step on this rank.

    Attributes:
        all_to_all_ms: sum over payload all-to-alls, forward and backward, of the time from launch to completion.
        exposed_ms: time that compute waited for payload all-to-alls.
        counts_exposed_ms: time that compute waited for token counts.
        num_all_to_alls: payload all-to-alls launched.
        payload_bytes: bytes that they sent to other ranks.
        num_dw_in_gaps: deferred dWs that ran in front of the wait for an all-to-all: on the CPU while it was in flight.
            On CUDA the host only knows that it enqueued them there; the message may have arrived before they ran.
        num_dw_early: deferred dWs that ran before their gap, because memory for them was bounded.
        num_dw_late: deferred dWs that ran behind the wait that ended their window, or at the end of a backward pass.
        peak_dw_bytes: peak memory pinned by deferred dWs.
        num_grad_micro_ops: parts of gradient reductions that gave way to all-to-alls.
        num_grad_micro_ops_between: parts launched between two all-to-alls; the others were launched after the last.
        grad_bytes: bytes of gradients that these parts reduced.
        grad_exposed_ms: time that compute waited for them.
    """

    all_to_all_ms: float = 0.0
    exposed_ms: float = 0.0
    counts_exposed_ms: float = 0.0
    num_all_to_alls: int = 0
    payload_bytes: int = 0
    num_dw_in_gaps: int = 0
    num_dw_early: int = 0
    num_dw_late: int = 0
    peak_dw_bytes: int = 0
    num_grad_micro_ops: int = 0
    num_grad_micro_ops_between: int = 0
    grad_bytes: int = 0
    grad_exposed_ms: float = 0.0


class EventPair:
    """Measures the time between two points of the current CUDA stream."""

    def __init__(self) -> None:
        self.start = torch.cuda.Event(enable_timing=True)
        self.end = torch.cuda.Event(enable_timing=True)
        self.start.record()

    def elapsed_ms(self) -> float:
        """Returns milliseconds between the two points; both must have been reached."""
        return self.start.elapsed_time(self.end)


class CommStats:
    """Accumulates :class:`CommTimes` over a step.

    On the CPU a wait blocks the main thread and is timed with the host's clock. On CUDA it blocks only the compute
    stream and is timed with events around it, which :meth:`take` resolves.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._times = CommTimes()
        self._pending: list[tuple[str, EventPair]] = []

    @contextmanager
    def waiting(self, *counters: str) -> Iterator[None]:
        """Adds the time that compute waits inside the context to each of ``counters``."""
        if self._on_cuda:
            pair = EventPair()
            yield
            pair.end.record()
            for counter in counters:
                self.add_later(counter, pair)
        else:
            start_s = time.perf_counter()
            yield
            for counter in counters:
                self.add(counter, (time.perf_counter() - start_s) * 1e3)

    def add(self, counter: str, amount: float) -> None:
        """Adds ``amount`` to ``counter``."""
        setattr(self._times, counter, getattr(self._times, counter) + amount)

    def add_later(self, counter: str, pair: EventPair) -> None:
        """Adds the time between two CUDA events once they have been reached."""
        self._pending.append((counter, pair))

    def raise_to(self, counter: str, amount: int) -> None:
        """Raises ``counter`` to at least ``amount``."""
        setattr(self._times, counter, max(getattr(self._times, counter), amount))

    def take(self) -> CommTimes:
        """Returns the counters since the last call and resets them for the next step."""
        for counter, pair in self._pending:
            pair.end.synchronize()
            self.add(counter, pair.elapsed_ms())
        self._pending.clear()
        times, self._times = self._times, CommTimes()
        return times
