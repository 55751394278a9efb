"""Launches the all-to-alls of a model, waits for them, and tracks the position of this rank.

A dispatch cannot be launched before its token counts are known. The computing thread does not wait for them but goes on
with other chunks, and the dispatch is launched

- by a transport with separate connections for such messages: when the counts arrive, on the thread that receives them.
  If all messages keep one order, which pairing asks for, it is launched there too, but on the connections of the
  others, and before the next one of these;
- by the other transports: before the next collective is launched, or when the dispatch is waited for. That is as late
  as the plan's order allows; on CUDA another chunk's work has been enqueued by then.

In both cases the messages of one connection (one stream) are launched in the plan's order, the same on every rank.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch

from megatron_lancet.registry import position_class
from megatron_lancet.runtime.comm_stats import CommStats
from megatron_lancet.runtime.exchange import CountsExchange, Exchange, Handle, LocalExchange, PendingSplits, RowSplits
from megatron_lancet.runtime.peers import Peers
from megatron_lancet.runtime.position import Position
from megatron_lancet.runtime.recorder import Recorder, waiting
from megatron_lancet.runtime.transport.base import ReadyEvent, TokenCounts, Transfer, Transport
from megatron_lancet.runtime.transport.hops import Hop, Hops
from megatron_lancet.runtime.weight_grad_store import WeightGradStore
from megatron_lancet.schedule.dispatch import PLAIN, Dispatch
from megatron_lancet.schedule.nodes import Nodes
from megatron_lancet.schedule.ops import FIRST_DISPATCHES, Op, Phase
from megatron_lancet.schedule.ranges import name_ranks

_LAUNCHED, _WAITING, _PAST = "launched", "waiting for", "past"


class BackwardMessages(Protocol):
    """Follows the all-to-alls of the backward pass, for example to launch gradient reductions between them."""

    def expect_backward(self) -> None:
        """Announces the backward all-to-all of a forward one."""

    def issued(self) -> None:
        """Called before a backward all-to-all is launched."""

    def passed(self, op: Op) -> None:
        """Called after the wait for a backward all-to-all."""


@dataclass(frozen=True)
class CommSettings:
    """Settings that may change between the steps of a model; the same on all ranks, but for ``expert_rows``.

    Attributes:
        dispatch: what all-to-alls carry.
        keeps_one_order: whether all messages are sent one after the other in the plan's order, also where a transport
            has connections for dispatches of their own. With these, a dispatch of a forward and the message of the
            backward paired with it share the link, arrive at about the same time, and leave the link idle afterwards;
            one after the other, the second transfers while the first is being used.
        max_expert_rows: rows of a chunk that a rank's experts may work on at a time, see ``features/row_bound``; None
            for no bound.
        expert_rows: receives layer and counts [P * V][e] of each exchange of token counts; None while unused.
    """

    dispatch: Dispatch = PLAIN
    keeps_one_order: bool = False
    max_expert_rows: int | None = None
    expert_rows: Callable[[int, list[list[int]]], None] | None = None


class Comm:
    """Shared state of a model's all-to-alls: transport, deferred dWs, counters, and the position of this rank.

    Attributes:
        progress: the place of this rank in the step, and the forwards that run beside backwards.
        settings: what may change between steps.
        nodes: how the expert-parallel group lies on nodes; None if no plan of this model has two hops.
        own_rank: this rank's place in the expert-parallel group.
        trace: trace of the current step, None while nothing is recorded.
    """

    def __init__(
        self,
        transport: Transport,
        store: WeightGradStore | None,
        stats: CommStats,
        own_rank: int,
        peers: Peers | None = None,
        scheduler: BackwardMessages | None = None,
        hops: Hops | None = None,
        layout: Nodes | None = None,
        max_expert_rows: int | None = None,
    ) -> None:
        """
        Args:
            peers: identifies the rank that caused a failure; None leaves it unnamed.
            scheduler: queue of the gradient reductions that give way to all-to-alls; None if they don't.
            hops: connections of the messages of two hops; None if no plan of this model has any.
            layout: how the expert-parallel group lies on nodes, to count bytes that leave a node; None for the layout
                of the hops, or if it is unknown.
            max_expert_rows: of the settings at first.
        """
        self.transport = transport
        self.store = store
        self.stats = stats
        self.scheduler = scheduler
        self.progress: Position = position_class()(store, stats.on_cuda)
        self.settings = CommSettings(max_expert_rows=max_expert_rows)
        self.trace: Recorder | None = None
        self.own_rank = own_rank
        self._whole = Hop(transport, own_rank, peers)
        self._hops = hops.by_kind if hops is not None else {}
        self.nodes = hops.nodes if hops is not None else None
        self._layout = layout if layout is not None else self.nodes
        self._pending: deque[Exchange] = deque()
        self._launching = threading.Lock()

    def use(self, settings: CommSettings) -> None:
        """Changes the settings from the next step on. Call between steps."""
        self.settings = settings

    def record_to(self, trace: Recorder | None) -> None:
        """Records ops, waits, dWs and messages into ``trace`` from now on; None stops it. Call between steps."""
        self.trace = self.progress.trace = trace
        if self.store is not None:
            self.store.trace = trace

    @property
    def position(self) -> str:
        """The last op of this rank and its state, for error messages and hanging ranks.

        While a forward runs during a backward, first comes the one that has the turn, then the other.
        """
        return self.progress.position(self._in_words)

    def _in_words(self, doing: str, op: Op) -> str:
        peers = self._hop_of(op).peers
        sources = f" from {name_ranks(peers.others)}" if doing == _WAITING and peers is not None else ""
        return f"{doing} {op} ({op.description()}){sources}"

    def _hop_of(self, op: Op) -> Hop:
        """The connections of a message."""
        return self._hops.get(op.kind, self._whole)

    def transport_of(self, op: Op) -> Transport:
        """The transport of a message."""
        return self._hop_of(op).transport

    def launch_counts(self, op: Op, count: Callable[[], torch.Tensor], ready: ReadyEvent) -> CountsExchange:
        """Launches the exchange of the token counts that ``count`` returns; see :meth:`Transport.exchange_counts`."""
        self._launch_pending()
        self.mark(_LAUNCHED, op)
        transfer = self.transport.exchange_counts(count, ready)
        if self.trace is not None and not self.transport.is_local:
            transfer.watch()
            self.trace.sent(str(op), transfer.num_bytes, transfer)
        return CountsExchange(self, op, transfer)

    def launch(self, op: Op, tensors: tuple[torch.Tensor, ...], splits: RowSplits) -> Handle:
        """Launches an all-to-all of ``tensors``, each [N, ...]."""
        self._launch_pending()
        transport = self.transport_of(op)
        self._let_pending_launch(transport)
        self.mark(_LAUNCHED, op)
        if transport.is_local:
            return LocalExchange(tensors)
        exchange = Exchange(self, op, tensors, splits)
        exchange.launch()
        return exchange

    def launch_when_known(self, op: Op, tensors: tuple[torch.Tensor, ...], pending: PendingSplits) -> Handle:
        """Launches an all-to-all of ``tensors``, each [N, ...], as soon as ``pending`` is known; returns at once.

        N may be larger than the number of rows in the splits: those behind them are not sent.
        """
        self.mark(_LAUNCHED, op)
        if self.transport_of(op).is_local:
            return LocalExchange(tensors)
        exchange = Exchange(self, op, tensors, pending)
        self._pending.append(exchange)
        if self.transport.launches_in_callback:
            pending.counts.when_done(self._launch_those_known)
        return exchange

    def wait_for_counts(self, exchange: CountsExchange) -> TokenCounts:
        """See :meth:`CountsExchange.wait`."""
        try:
            return exchange.transfer.wait()
        except RuntimeError as error:
            if self.stats.on_cuda:  # an error of this rank's device: NCCL's watchdog ends the process if a peer is lost
                error.add_note(f"seen in the wait for {exchange.op} ({exchange.op.description()})")
                raise
            raise self._failure(exchange.op, exchange.launched_s, exchange.micro_batch, error) from error

    def wait_for_own_counts(self, exchange: CountsExchange) -> list[list[int]]:
        """See :meth:`CountsExchange.wait_for_own`."""
        with self._waiting_for_counts():
            return exchange.transfer.wait_for_own()

    def wait_for(self, exchange: Exchange) -> None:
        """Blocks until the rows of ``exchange`` have arrived; see :meth:`Exchange.wait`."""
        self.wait_for_launch(exchange)
        assert exchange.transfer is not None
        self.mark(_WAITING, exchange.op)
        try:
            with waiting(self.trace, exchange.op):
                exchange.transfer.wait()
        except RuntimeError as error:
            raise self._failure(exchange.op, exchange.created_s, exchange.micro_batch, error) from error
        self.mark(_PAST, exchange.op)
        self._count(exchange, exchange.transfer)

    def wait_for_launch(self, exchange: Exchange) -> None:
        """Blocks until ``exchange`` has been launched, or left out; raises what has kept it from being launched."""
        if exchange.pending is not None and (exchange.error is not None or not exchange.launched.is_set()):
            counts = exchange.pending.counts.op
            self.mark(_WAITING, counts)
            with waiting(self.trace, counts):
                self._launch_up_to(exchange)
            if exchange.error is not None:
                raise exchange.error

    def mark(self, doing: str, op: Op) -> None:
        """Sets this rank's position: it has ``launched`` the op, is ``waiting for`` it, or is ``past`` it."""
        self.progress.mark(doing, op)

    def _launch_up_to(self, exchange: Exchange) -> None:
        """Blocks until ``exchange``, and every message that was to be launched before it, has been launched."""
        if self.transport.launches_in_callback:
            with self._waiting_for_counts():
                exchange.launched.wait()
        while not exchange.launched.is_set():
            self._pending.popleft().launch()

    def _launch_pending(self) -> None:
        """Launches the queued messages if the transport needs one order among all collectives."""
        if not self._pending or self.transport.launches_in_callback:
            return
        first = self._pending[0].pending
        assert first is not None
        with waiting(self.trace, first.counts.op):
            while self._pending:
                self._pending.popleft().launch()

    def _let_pending_launch(self, transport: Transport) -> None:
        """Waits until the queued messages have been launched on other threads, if all messages keep one order.

        Args:
            transport: connections of the next message; those that are queued for others are not waited for.
        """
        if not self.shares_connections:
            return
        with self._launching:
            last = self._pending[-1] if self._pending else None
        if last is None or self.transport_of(last.op) is not transport:
            return
        assert last.pending is not None
        self.mark(_WAITING, last.pending.counts.op)
        with waiting(self.trace, last.pending.counts.op), self._waiting_for_counts():
            last.launched.wait()

    @property
    def shares_connections(self) -> bool:
        """Whether messages that were launched on another thread use the connections of all others."""
        return self.settings.keeps_one_order and self.transport.launches_in_callback

    def _launch_those_known(self) -> None:
        """Launches messages in queue order as far as their counts are known. Called on any thread."""
        with self._launching:
            while self._pending and self._pending[0].is_known():
                self._pending.popleft().launch()

    def _waiting_for_counts(self) -> AbstractContextManager[None]:
        """Counts the time that compute stands still because the host waits inside for token counts.

        On CUDA the host records an event on the compute stream when it begins to wait, and another one right after. The
        first is reached when the device has run all that was enqueued; the second, on an idle stream, when it is
        recorded. So the time between them is what the device had nothing to do, not what the host waited.
        """
        return self.stats.waiting("counts_exposed_ms")

    def splits_of(self, exchange: Exchange) -> RowSplits | None:
        """Waits for the splits of a queued message, if they are not known yet; see :meth:`PendingSplits.splits`."""
        assert exchange.pending is not None
        if exchange.is_known():
            return exchange.pending.splits()
        with self._waiting_for_counts():
            return exchange.pending.splits()

    def _failure(self, op: Op, launched_s: float, micro_batch: int | None, error: RuntimeError) -> RuntimeError:
        """Converts an error of the transport into one that names the op and, if known, micro-batch and failed rank."""
        peers = self._hop_of(op).peers
        if peers is None:
            return RuntimeError(f"all-to-all {op} did not complete: {error}")
        return peers.failure(op, time.monotonic() - launched_s, error, micro_batch)

    def _count(self, exchange: Exchange, transfer: Transfer) -> None:
        own_rank = self._hop_of(exchange.op).own_rank
        num_rows = sum(exchange.splits.sent) - exchange.splits.sent[own_rank]
        num_bytes = num_rows * exchange.row_bytes
        self.stats.add("payload_bytes", num_bytes)
        self.stats.add("num_all_to_alls", 1)
        if self._layout is not None:
            num_leaving = self._layout.num_leaving(exchange.op, exchange.splits.sent, self.own_rank, num_rows)
            self.stats.add("between_nodes_bytes", num_leaving * exchange.row_bytes)
            if exchange.op.kind in FIRST_DISPATCHES and exchange.op.phase is Phase.FORWARD:
                self.stats.add("between_nodes_rows", num_leaving)
        if self.trace is not None:
            rows_to = (0 if rank == own_rank else rows for rank, rows in enumerate(exchange.splits.sent))
            bytes_to = [rows * exchange.row_bytes for rows in rows_to]
            self.trace.sent(str(exchange.op), num_bytes, transfer, bytes_to)
