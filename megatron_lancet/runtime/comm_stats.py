"""Counts what communication cost: how long messages were in flight, and how long anybody waited for them."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass
class CommTimes:
    """Communication of one training step on this rank.

    Attributes:
        all_to_all_ms: sum over payload all-to-alls, forward and backward, of the time from issue to completion.
        exposed_ms: part of it for which compute stood still, waiting.
        counts_exposed_ms: time waited for token counts.
        num_all_to_alls: payload all-to-alls issued.
        payload_bytes: bytes sent to other ranks in them.
        num_dw_hidden: deferred weight gradients that ran while an all-to-all was in flight.
        num_dw_early: deferred weight gradients that ran before a gap came, because memory for them was bounded.
        num_dw_late: deferred weight gradients that found no gap and ran with nothing in flight.
        peak_dw_bytes: largest amount of memory that deferred weight gradients pinned.
        num_grad_micro_ops: parts of gradient reductions that gave way to all-to-alls, all that were launched.
        num_grad_micro_ops_between: those of them that were launched between two all-to-alls; the others after the last.
        grad_bytes: gradients that they reduced.
        grad_exposed_ms: time waited for them.
    """

    all_to_all_ms: float = 0.0
    exposed_ms: float = 0.0
    counts_exposed_ms: float = 0.0
    num_all_to_alls: int = 0
    payload_bytes: int = 0
    num_dw_hidden: int = 0
    num_dw_early: int = 0
    num_dw_late: int = 0
    peak_dw_bytes: int = 0
    num_grad_micro_ops: int = 0
    num_grad_micro_ops_between: int = 0
    grad_bytes: int = 0
    grad_exposed_ms: float = 0.0


class EventPair:
    """Time between two points of the current CUDA stream."""

    def __init__(self) -> None:
        self.start = torch.cuda.Event(enable_timing=True)
        self.end = torch.cuda.Event(enable_timing=True)
        self.start.record()

    def elapsed_ms(self) -> float:
        """Milliseconds between the two; both must have happened."""
        return self.start.elapsed_time(self.end)


class CommStats:
    """Accumulates :class:`CommTimes` over a step.

    On the CPU a wait blocks the main thread, and its length is read off the clock. On CUDA a wait only makes the
    compute stream wait: the figures come from events around it, resolved in :meth:`take`.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._times = CommTimes()
        self._pending: list[tuple[str, EventPair]] = []

    @contextmanager
    def waiting(self, *counters: str) -> Iterator[None]:
        """Adds the time that compute stands still inside the context to each of ``counters``."""
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
        """Adds ``amount`` to the ``counter``."""
        setattr(self._times, counter, getattr(self._times, counter) + amount)

    def add_later(self, counter: str, pair: EventPair) -> None:
        """Adds the time between two CUDA events once they have happened."""
        self._pending.append((counter, pair))

    def raise_to(self, counter: str, amount: int) -> None:
        """Makes the ``counter`` at least ``amount``."""
        setattr(self._times, counter, max(getattr(self._times, counter), amount))

    def take(self) -> CommTimes:
        """The figures since the last call, which starts the next step."""
        for counter, pair in self._pending:
            pair.end.synchronize()
            self.add(counter, pair.elapsed_ms())
        self._pending.clear()
        times, self._times = self._times, CommTimes()
        return times
