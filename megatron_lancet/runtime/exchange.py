"""Handles of messages: queued until token counts are known, launched, received. ``comm.py`` orders them."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from megatron_lancet.runtime.device import on_cuda
from megatron_lancet.runtime.position import Position
from megatron_lancet.runtime.rows.packing import RowLayout
from megatron_lancet.runtime.transport.base import CountsTransfer, ReadyEvent, TokenCounts, Transfer, Transport
from megatron_lancet.schedule.ops import Op


@dataclass(frozen=True)
class RowSplits:
    """Rows between this rank and each rank of the expert-parallel group, in rank order."""

    sent: tuple[int, ...]
    received: tuple[int, ...]

    def reversed(self) -> "RowSplits":
        """Returns the splits of the message in the other direction."""
        return RowSplits(sent=self.received, received=self.sent)


class PendingSplits(Protocol):
    """Splits that are known once token counts have arrived."""

    @property
    def counts(self) -> "CountsExchange":
        """The token counts that determine the splits."""

    def splits(self) -> RowSplits | None:
        """Waits for the counts and returns the splits; None if the rows are not sent in one message."""


class Handle(Protocol):
    """A message that was launched, or is queued until its token counts are known."""

    @property
    def on_cuda(self) -> bool:
        """Whether the message moves between tensors on a CUDA device."""

    def in_flight(self) -> bool:
        """Whether the message has not arrived yet; never blocks."""

    def is_left_out(self) -> bool:
        """Waits until the message was launched, or its token counts say that its rows are not sent in one message."""

    def wait(self) -> tuple[torch.Tensor, ...]:
        """Waits, and returns the received tensors, each [M, ...]; a second call returns them again.

        Raises:
            PeerError: a peer is gone, or silent for longer than the timeout.
        """


class Launcher(Protocol):
    """Orders the launches of messages and waits for them; see :class:`~megatron_lancet.runtime.comm.Comm`."""

    @property
    def progress(self) -> Position: ...
    @property
    def shares_connections(self) -> bool: ...

    def transport_of(self, op: Op) -> Transport: ...
    def splits_of(self, exchange: "Exchange") -> RowSplits | None: ...
    def wait_for_launch(self, exchange: "Exchange") -> None: ...
    def wait_for(self, exchange: "Exchange") -> None: ...
    def wait_for_counts(self, exchange: "CountsExchange") -> TokenCounts: ...
    def wait_for_own_counts(self, exchange: "CountsExchange") -> list[list[int]]: ...


class CountsExchange:
    """Handle of an exchange of token counts.

    Attributes:
        micro_batch: number of the micro-batch; None where it is not known.
    """

    def __init__(self, comm: Launcher, op: Op, transfer: CountsTransfer) -> None:
        self.op = op
        self.transfer = transfer
        self.launched_s = time.monotonic()
        self.micro_batch = comm.progress.number
        self._comm = comm

    def done(self) -> bool:
        """Whether the exchange has completed or failed; never blocks."""
        return self.transfer.done()

    def when_done(self, callback: Callable[[], None]) -> None:
        """Calls ``callback`` when the exchange has completed or failed: at once, or on another thread."""
        self.transfer.when_done(callback)

    def wait_for_own(self) -> list[list[int]]:
        """Waits until the sent counts [Q][e] are known on the host; see ``CountsTransfer``."""
        return self._comm.wait_for_own_counts(self)

    def wait(self) -> TokenCounts:
        """Waits until the counts are known on the host.

        Raises:
            PeerError: a peer is gone, or silent for longer than the timeout.
        """
        return self._comm.wait_for_counts(self)


class LocalExchange:
    """Handle of a message in a group of one rank, which moves no rows."""

    def __init__(self, tensors: tuple[torch.Tensor, ...]) -> None:
        self._tensors = tuple(tensor.detach() for tensor in tensors)

    @property
    def on_cuda(self) -> bool:
        return on_cuda(self._tensors[0])

    def in_flight(self) -> bool:
        return False

    def is_left_out(self) -> bool:
        return False

    def wait(self) -> tuple[torch.Tensor, ...]:
        return self._tensors


_AT_ONCE = threading.Event()
"""The event of all messages whose splits are known: ``Comm.launch`` launches them at once, and no wait blocks on it."""
_AT_ONCE.set()


class Exchange:
    """Handle of one message: queued until its token counts are known, launched, received.

    Attributes:
        pending: splits that the launch needs; None if they were known at once.
        created_s: time at which the rows were complete, by ``time.monotonic``.
        micro_batch: number of the micro-batch; None where it is not known.
        launched: set when the message has been launched, could not be, or is left out.
        error: reason why it could not be launched; raised by the wait.
        splits: rows by rank; valid after the launch.
        transfer: transfer of the transport; None before the launch, and if the message is left out.
    """

    def __init__(
        self, comm: Launcher, op: Op, tensors: tuple[torch.Tensor, ...], splits: RowSplits | PendingSplits
    ) -> None:
        """Packs ``tensors``, [N, ...] each."""
        self.op = op
        self.splits = splits if isinstance(splits, RowSplits) else RowSplits((), ())
        self.pending = None if isinstance(splits, RowSplits) else splits
        self.created_s = time.monotonic()
        self.micro_batch = comm.progress.number
        self.launched = _AT_ONCE if self.pending is None else threading.Event()
        self.error: Exception | None = None
        self.transfer: Transfer | None = None
        self._comm = comm
        self._layout = RowLayout.of(tensors)
        self._sent = self._received = self._layout.pack(tensors)
        self._ready = ReadyEvent(self._sent) if self.pending is not None else None
        self._result: tuple[torch.Tensor, ...] | None = None

    @property
    def row_bytes(self) -> int:
        """Bytes of a packed row."""
        return self._sent.element_size() * self._sent.shape[1:].numel()

    @property
    def on_cuda(self) -> bool:
        return on_cuda(self._sent)

    def is_known(self) -> bool:
        """Whether a queued message can be launched without waiting."""
        assert self.pending is not None
        return self.pending.counts.done()

    def launch(self) -> None:
        """Launches the message when its splits are known.

        With pending splits this runs on any thread, so an error is kept for the wait to raise.
        """
        try:
            splits = self.splits if self.pending is None else self._comm.splits_of(self)
            if splits is not None:
                self.splits = splits
                transport = self._comm.transport_of(self.op)
                shape = (sum(splits.received), *self._sent.shape[1:])
                if self._ready is None:
                    self._received = self._sent.new_empty(shape)
                else:
                    self._received = transport.empty_receive(shape, self._sent)
                ready = None if self._comm.shares_connections else self._ready
                sent = self._sent[: sum(splits.sent)]
                self.transfer = transport.launch(self._received, sent, splits.received, splits.sent, ready)
        except Exception as error:
            if self.pending is None:
                raise
            self.error = error  # raised again by the wait, on the computing thread
        if self.pending is not None:
            self.launched.set()

    def in_flight(self) -> bool:
        return self._result is None and (self.transfer is None or not self.transfer.done())

    def is_left_out(self) -> bool:
        self._comm.wait_for_launch(self)
        return self.transfer is None

    def wait(self) -> tuple[torch.Tensor, ...]:
        if self._result is None:
            self._comm.wait_for(self)
            self._result = self._layout.unpack(self._received)
        return self._result
