"""All-to-alls of a model on their way: when they leave, when they have landed, and where this rank stands.

A dispatch can't leave before its token counts have come. Nobody waits for these: the dispatch is *armed*, the
computing thread goes on with other chunks, and it leaves

- where the transport has connections of its own for such messages: the moment the counts come, on the thread that
  brings them;
- else before the next collective is started, or when its rows are waited for: as late as an order that is the plan's
  allows. On CUDA the device has been given another chunk's work by then.

Either way the messages of one connection (one stream) start in the plan's order, on every rank the same.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from megatron_lancet.runtime.comm_scheduler import CommScheduler
from megatron_lancet.runtime.comm_stats import CommStats
from megatron_lancet.runtime.packing import RowLayout
from megatron_lancet.runtime.peers import Peers, listed
from megatron_lancet.runtime.trace import Trace, waiting
from megatron_lancet.runtime.transport.base import Armed, CountsTransfer, Transfer, Transport
from megatron_lancet.runtime.weight_grad_store import WeightGradStore
from megatron_lancet.schedule.ops import Op

_WAITING = "waiting for"


@dataclass(frozen=True)
class RowSplits:
    """Rows that travel between this rank and each rank of the expert-parallel group, in rank order."""

    sent: tuple[int, ...]
    received: tuple[int, ...]

    def reversed(self) -> "RowSplits":
        """The way back."""
        return RowSplits(sent=self.received, received=self.sent)


class PendingSplits(Protocol):
    """Splits that are known when token counts have come."""

    @property
    def counts(self) -> "CountsFlight":
        """These counts."""

    def splits(self) -> RowSplits:
        """Waits for them."""


class Comm:
    """What all all-to-alls of a model share: transport, deferred dWs, counters, and where this rank stands.

    Attributes:
        trace: of the present step, None where nothing is recorded.
    """

    def __init__(
        self,
        transport: Transport,
        store: WeightGradStore | None,
        stats: CommStats,
        own_rank: int,
        peers: Peers | None = None,
        scheduler: CommScheduler | None = None,
    ) -> None:
        """
        Args:
            own_rank: in the expert-parallel group.
            peers: names the rank that is to blame when a message does not come; None leaves it unnamed.
            scheduler: of gradient reductions that give way to all-to-alls; None where they don't.
        """
        self.transport = transport
        self.store = store
        self.stats = stats
        self.scheduler = scheduler
        self.trace: Trace | None = None
        self._own_rank = own_rank
        self._peers = peers
        self._last: tuple[str, Op] | None = None
        self._armed: deque[Flight] = deque()
        self._leaving = threading.Lock()

    def record_to(self, trace: Trace | None) -> None:
        """From now on record ops, waits, dWs and messages there; None: nowhere. Call between steps."""
        self.trace = trace
        if self.store is not None:
            self.store.trace = trace

    @property
    def position(self) -> str:
        """What this rank last did with which op; the first thing to look at when ranks hang."""
        if self._last is None:
            return "before the first all-to-all"
        doing, op = self._last
        sources = f" from {listed(self._peers.others)}" if doing == _WAITING and self._peers is not None else ""
        return f"{doing} {op} ({op.in_words()}){sources}"

    def stands(self, doing: str, op: Op) -> None:
        """Note where this rank is: ``issued``, ``waiting for`` or ``past`` an op."""
        self._last = (doing, op)

    def failure(self, op: Op, issued_s: float, cause: RuntimeError) -> RuntimeError:
        """The error to raise for an op that did not complete, because of ``cause``."""
        if self._peers is None:
            return RuntimeError(f"all-to-all {op} did not complete: {cause}")
        return self._peers.failure(op, time.monotonic() - issued_s, cause)

    def start_counts(self, op: Op, counts: torch.Tensor) -> "CountsFlight":
        """Starts the exchange of token counts, [E] per expert of all ranks, ordered by expert."""
        self._keep_order()
        self.stands("issued", op)
        transfer = self.transport.exchange_counts(counts)
        if self.trace is not None and not self.transport.is_alone:
            transfer.watch()
            # Of Q equal parts one stays here. Q is the number of ranks that exchange counts, e experts each.
            self.trace.sent(str(op), counts.nbytes - transfer.own_bytes, transfer)
        return CountsFlight(self, op, transfer)

    def start(self, op: Op, tensors: tuple[torch.Tensor, ...], splits: RowSplits) -> "Flight":
        """Starts an all-to-all of ``tensors``, each [N, ...]."""
        self._keep_order()
        self.stands("issued", op)
        flight = Flight(self, op, tensors)
        flight.leave(splits)
        return flight

    def start_after(self, op: Op, tensors: tuple[torch.Tensor, ...], pending: PendingSplits) -> "Flight":
        """Arms an all-to-all of ``tensors``, each [N, ...]: it leaves when ``pending`` is known."""
        self.stands("issued", op)
        flight = Flight(self, op, tensors, pending)
        if self.transport.is_alone:
            return flight
        self._armed.append(flight)
        if self.transport.leaves_by_itself:
            pending.counts.when_here(self._let_ready_leave)
        return flight

    def let_leave_up_to(self, flight: "Flight") -> None:
        """Blocks until ``flight``, and what was armed before it, has left."""
        with self._waiting_for_counts():
            if self.transport.leaves_by_itself:
                flight.left.wait()
            while not flight.left.is_set():
                self._armed.popleft().leave_when_known()

    def _keep_order(self) -> None:
        """Called before a collective is started: what was armed goes first where the order matters."""
        if self._armed and not self.transport.leaves_by_itself:
            with self._waiting_for_counts(), waiting(self.trace, self._armed[0].waits_for):
                while self._armed:
                    self._armed.popleft().leave_when_known()

    @contextmanager
    def _waiting_for_counts(self) -> Iterator[None]:
        """Adds up for how long the host stands still. On CUDA the device may be busy meanwhile."""
        start_s = time.perf_counter()
        yield
        self.stats.add("counts_exposed_ms", (time.perf_counter() - start_s) * 1e3)

    def _let_ready_leave(self) -> None:
        """Called on any thread when some counts have come."""
        with self._leaving:
            while self._armed and self._armed[0].is_ready():
                self._armed.popleft().leave_when_known()

    def count(self, op: Op, splits: RowSplits, row_bytes: int, transfer: Transfer) -> None:
        """One more all-to-all, which has come. Called on the computing thread."""
        num_bytes = (sum(splits.sent) - splits.sent[self._own_rank]) * row_bytes
        self.stats.add("payload_bytes", num_bytes)
        self.stats.add("num_all_to_alls", 1)
        if self.trace is not None:
            self.trace.sent(str(op), num_bytes, transfer)


class CountsFlight:
    """Token counts on the wire."""

    def __init__(self, comm: Comm, op: Op, transfer: CountsTransfer) -> None:
        self.op = op
        self._comm = comm
        self._transfer = transfer
        self._issued_s = time.monotonic()

    def is_here(self) -> bool:
        """Whether they have come, or will not come any more; never blocks."""
        return self._transfer.done()

    def when_here(self, callback: Callable[[], None]) -> None:
        """Calls ``callback`` when they have come or failed: at once, or on another thread."""
        self._transfer.when_done(callback)

    def land(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Waits; sent and received counts on the host, both [Q, e], by peer and by that peer's (own) expert.

        Raises:
            PeerError: a peer is gone or silent for longer than the timeout.
        """
        try:
            return self._transfer.wait()
        except RuntimeError as error:
            raise self._comm.failure(self.op, self._issued_s, error) from error


class Flight:
    """One op's message, on the wire or armed."""

    def __init__(
        self, comm: Comm, op: Op, tensors: tuple[torch.Tensor, ...], pending: PendingSplits | None = None
    ) -> None:
        """
        Args:
            tensors: [N, ...] each.
            pending: what it must wait for, None if the splits will be given.
        """
        self.left = threading.Event()
        self._comm = comm
        self._op = op
        self._pending = pending
        self._transfer: Transfer | None = None
        self._splits = RowSplits((), ())
        self._error: Exception | None = None
        self._landed: tuple[torch.Tensor, ...] | None = None
        self._issued_s = time.monotonic()
        self._layout = RowLayout.of(tensors)
        if comm.transport.is_alone:
            self._sent = tensors[0]
            self._landed = tuple(tensor.detach() for tensor in tensors)
        else:
            self._sent = self._layout.pack(tensors)
        self._armed = Armed(self._sent) if pending is not None else None
        self._received = self._sent

    @property
    def waits_for(self) -> Op:
        """What an armed flight waits for."""
        assert self._pending is not None
        return self._pending.counts.op

    def is_ready(self) -> bool:
        """Whether an armed flight need not wait any more."""
        assert self._pending is not None
        return self._pending.counts.is_here()

    def leave_when_known(self) -> None:
        """Waits for the splits and leaves. An error is kept for whoever waits: this may be another thread."""
        assert self._pending is not None
        try:
            self.leave(self._pending.splits())
        except Exception as error:  # noqa: BLE001 - raised again by whoever waits, on the computing thread
            self._error = error
            self.left.set()

    def leave(self, splits: RowSplits) -> None:
        """Starts the message."""
        if self._landed is not None:
            return
        self._splits = splits
        transport, shape = self._comm.transport, (sum(splits.received), *self._sent.shape[1:])
        if self._armed is None:
            self._received = self._sent.new_empty(shape)
        else:
            self._received = transport.make_room(shape, self._sent)
        self._transfer = transport.start(self._received, self._sent, splits.received, splits.sent, self._armed)
        self.left.set()

    @property
    def on_cuda(self) -> bool:
        """Whether the message moves between tensors on a CUDA device."""
        return self._sent.is_cuda

    def in_flight(self) -> bool:
        """Whether the message is still on its way; never blocks."""
        return self._landed is None and (self._transfer is None or not self._transfer.done())

    def land(self) -> tuple[torch.Tensor, ...]:
        """Waits, and returns the received tensors, each [M, ...]; a second call returns them again.

        Raises:
            PeerError: a peer is gone or silent for longer than the timeout.
        """
        if self._landed is not None:
            return self._landed
        if self._pending is not None and (self._error is not None or not self.left.is_set()):
            self._comm.stands(_WAITING, self._pending.counts.op)
            with waiting(self._comm.trace, self.waits_for):
                self._comm.let_leave_up_to(self)
            if self._error is not None:
                raise self._error
        assert self._transfer is not None
        self._comm.stands(_WAITING, self._op)
        try:
            with waiting(self._comm.trace, self._op):
                self._transfer.wait()
        except RuntimeError as error:
            raise self._comm.failure(self._op, self._issued_s, error) from error
        self._comm.stands("past", self._op)
        row_bytes = self._sent.element_size() * self._sent.shape[1:].numel()
        self._comm.count(self._op, self._splits, row_bytes, self._transfer)
        self._landed = self._layout.unpack(self._received)
        return self._landed
