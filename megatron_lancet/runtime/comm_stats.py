"""Counts the cost of communication: the time that messages were in flight, and the time that compute waited."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from types import TracebackType

import torch

from megatron_lancet.schedule.ops import Op


class Counter(Enum):
    """How a counter of a step is reported, where that is not its median over steps and its mean over ranks.

    The report takes the rank where such a figure is largest.
    """

    SUM = auto()
    """The sum over all steps."""
    PEAK = auto()
    """The largest of all steps."""


@dataclass
class CommTimes:
    """Communication of one training step on this rank.

    Forwards and backwards that run side by side take turns, on the CPU as on the one compute stream of a CUDA device.
    So no wait is counted twice, and the exposed times of a step are shorter than the step.

    Attributes:
        all_to_all_ms: sum over payload all-to-alls, forward and backward, of the time from launch to completion.
        exposed_ms: time that compute waited for payload all-to-alls.
        counts_exposed_ms: time that compute waited for token counts; on CUDA the time that the compute stream had
            nothing to run while the host waited for them.
        num_all_to_alls: payload all-to-alls launched.
        payload_bytes: bytes that they sent to other ranks.
        between_nodes_bytes: bytes that left the node; 0 where it is not known how ranks lie on nodes.
        between_nodes_rows: rows that left the node in forward dispatches; 0 as above.
        num_routed_tokens: tokens of which these were the rows, counted in each layer with experts.
        num_chunks: chunks that this rank's experts worked on, counted in each layer with experts.
        num_expert_rows: rows of these chunks.
        peak_expert_rows: the most rows that they worked on at a time.
        num_split_chunks: chunks that were sent in several rounds, because a rank would have received more
            rows than ``--lancet-max-expert-rows``.
        num_split_steps: 1 in a step with such a chunk.
        most_rounds: the most rounds of a chunk; 0 if none was split.
        num_dw_in_gaps: deferred dWs that ran in front of the wait for an all-to-all of the backward, or of the forward
            next to it: on the CPU while it was in flight.
            On CUDA the host has only enqueued them there; the message may have arrived before they ran.
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
    between_nodes_bytes: int = 0
    between_nodes_rows: int = 0
    num_routed_tokens: int = 0
    num_chunks: int = field(default=0, metadata={Counter: Counter.SUM})
    num_expert_rows: int = 0
    peak_expert_rows: int = field(default=0, metadata={Counter: Counter.PEAK})
    num_split_chunks: int = field(default=0, metadata={Counter: Counter.SUM})
    num_split_steps: int = field(default=0, metadata={Counter: Counter.SUM})
    most_rounds: int = field(default=0, metadata={Counter: Counter.PEAK})
    num_dw_in_gaps: int = 0
    num_dw_early: int = 0
    num_dw_late: int = 0
    peak_dw_bytes: int = field(default=0, metadata={Counter: Counter.PEAK})
    num_grad_micro_ops: int = 0
    num_grad_micro_ops_between: int = 0
    grad_bytes: int = 0
    grad_exposed_ms: float = 0.0


@dataclass(frozen=True)
class SplitChunk:
    """A chunk that was sent in several rounds.

    Attributes:
        op: its dispatch.
        num_rows: the most rows that a rank's experts would have worked on at a time.
        rank: that rank's place in the expert-parallel group.
    """

    op: Op
    num_rounds: int
    num_rows: int
    rank: int


class EventPair:
    """Measures the time between two points of the current CUDA stream."""

    def __init__(self) -> None:
        self.start = torch.cuda.Event(enable_timing=True)
        self.end = torch.cuda.Event(enable_timing=True)
        self.start.record()

    def elapsed_ms(self) -> float:
        """Returns milliseconds between the two points; both must have been reached."""
        return self.start.elapsed_time(self.end)


class OpenTimes:
    """Counters of a step that the device may not have ended: some of their times are still in CUDA events."""

    def __init__(self, times: CommTimes, pairs: "list[_Timed]") -> None:
        self._times = times
        self._pairs = pairs

    @property
    def has_events(self) -> bool:
        """Whether the device must have ended the step before :meth:`read`."""
        return bool(self._pairs)

    def read(self) -> CommTimes:
        """Returns the counters, once; reads the events, all of which must have been reached."""
        for counters, start, end in self._pairs:
            ms = start.elapsed_time(end)
            for counter in counters:
                _add(self._times, counter, max(0.0, ms))
        self._pairs = []
        return self._times


class CommStats:
    """Accumulates :class:`CommTimes` over a step.

    On the CPU a wait blocks the main thread and is timed with the host's clock. On CUDA it blocks only the compute
    stream and is timed with events, which are read when the device has ended the step: by :meth:`take`, which waits for
    that, or later, after :meth:`close`. An all-to-all takes three events: its own two and one in front of the wait.

    Attributes:
        first_split: the first chunk that was sent in several rounds; None if none was.
    """

    def __init__(self, device: torch.device) -> None:
        self.on_cuda = device.type == "cuda"
        self.first_split: SplitChunk | None = None
        self._times = CommTimes()
        self._pairs: list[_Timed] = []

    def waiting(self, *counters: str) -> AbstractContextManager[None]:
        """Adds the time that compute waits inside the context to each of ``counters``."""
        return self._on_device(counters) if self.on_cuda else _HostWait(self, counters)

    @contextmanager
    def _on_device(self, counters: tuple[str, ...]) -> Iterator[None]:
        pair = EventPair()
        yield
        pair.end.record()
        self._pairs.append((counters, pair.start, pair.end))

    def wait_event(self, counter: str, arrived: torch.cuda.Event) -> None:
        """Makes the current stream wait for ``arrived``, a timed event of another, and adds that time to ``counter``.

        The stream waits from an event in front of the wait to ``arrived``. If ``arrived`` is earlier, the time between
        the two is negative and counts as 0.
        """
        before = torch.cuda.Event(enable_timing=True)
        before.record()
        torch.cuda.current_stream().wait_event(arrived)
        self._pairs.append(((counter,), before, arrived))

    def add(self, counter: str, amount: float) -> None:
        """Adds ``amount`` to ``counter``."""
        _add(self._times, counter, amount)

    def add_later(self, counter: str, pair: EventPair) -> None:
        """Adds the time between two CUDA events once they have been reached."""
        self._pairs.append(((counter,), pair.start, pair.end))

    def raise_to(self, counter: str, amount: int) -> None:
        """Raises ``counter`` to at least ``amount``."""
        setattr(self._times, counter, max(getattr(self._times, counter), amount))

    def read_reached(self) -> None:
        """Reads the events that the device has reached, without waiting.

        An evaluation has no steps to close. It calls this after each batch, and so keeps the events of few batches.
        """
        reached: list[_Timed] = []
        ahead: list[_Timed] = []
        for pair in self._pairs:
            (reached if pair[1].query() and pair[2].query() else ahead).append(pair)
        self._pairs = ahead
        OpenTimes(self._times, reached).read()

    def close(self) -> OpenTimes:
        """Returns the counters since the last call, without waiting for the device, and begins the next step's."""
        closed = OpenTimes(self._times, self._pairs)
        self._times, self._pairs = CommTimes(), []
        return closed

    def take(self) -> CommTimes:
        """Returns the counters like :meth:`close`, complete: waits for the device if some of them are in its events."""
        closed = self.close()
        if closed.has_events:
            torch.cuda.synchronize()
        return closed.read()


class _HostWait:
    """A wait, timed by the host's clock. Not a generator, since the host enters one for every message."""

    def __init__(self, stats: CommStats, counters: tuple[str, ...]) -> None:
        self._stats = stats
        self._counters = counters

    def __enter__(self) -> None:
        self._start_s = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            waited_ms = (time.perf_counter() - self._start_s) * 1e3
            for counter in self._counters:
                self._stats.add(counter, waited_ms)


_Timed = tuple[tuple[str, ...], torch.cuda.Event, torch.cuda.Event]
"""Counters, and the two events between which their time has passed."""


def _add(times: CommTimes, counter: str, amount: float) -> None:
    setattr(times, counter, getattr(times, counter) + amount)
