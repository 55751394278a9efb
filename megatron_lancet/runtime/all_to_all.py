"""An all-to-all as two autograd functions, issue and wait.

Autograd runs nodes in the reverse order of their creation. So the backward of *wait* issues the gradient's
all-to-all, the backward of *issue* waits for it, and what other chunks created between the two runs while it is in
flight: the backward pass is the mirrored pipeline, without a schedule of its own.
"""

import time
from dataclasses import dataclass
from typing import Any

import torch

from megatron_lancet.runtime.comm_stats import CommStats
from megatron_lancet.runtime.peers import Peers, listed
from megatron_lancet.runtime.transport import CountsTransfer, Transfer, Transport
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


class Comm:
    """What all all-to-alls of a model share: transport, deferred dWs, counters, and where this rank stands."""

    def __init__(
        self,
        transport: Transport,
        store: WeightGradStore | None,
        stats: CommStats,
        own_rank: int,
        peers: Peers | None = None,
    ) -> None:
        """
        Args:
            own_rank: in the expert-parallel group.
            peers: names the rank that is to blame when a message does not come; None leaves it unnamed.
        """
        self.transport = transport
        self.store = store
        self.stats = stats
        self._own_rank = own_rank
        self._peers = peers
        self._last: tuple[str, Op] | None = None

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
        self.stands("issued", op)
        return CountsFlight(self, op, self.transport.exchange_counts(counts))

    def start(self, op: Op, tensors: tuple[torch.Tensor, ...], splits: RowSplits) -> "Flight":
        """Starts the all-to-alls of ``tensors``, each [N, ...], as one op."""
        self.stands("issued", op)
        received, transfers = [], []
        for tensor in tensors:
            tensor = tensor.contiguous()
            into = tensor.new_empty((sum(splits.received), *tensor.shape[1:]))
            transfers.append(self.transport.start(into, tensor, splits.received, splits.sent))
            received.append(into)
            row_bytes = tensor.element_size() * tensor.shape[1:].numel()
            rows_to_others = sum(splits.sent) - splits.sent[self._own_rank]
            self.stats.add("payload_bytes", rows_to_others * row_bytes)
        self.stats.add("num_all_to_alls", 1)
        return Flight(self, op, tuple(received), transfers)


class CountsFlight:
    """Token counts on the wire."""

    def __init__(self, comm: Comm, op: Op, transfer: CountsTransfer) -> None:
        self._comm = comm
        self._op = op
        self._transfer = transfer
        self._issued_s = time.monotonic()

    def land(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Waits; sent and received counts on the host, both [P, E / P], by peer and by that peer's (own) expert.

        Raises:
            PeerError: a peer is gone or silent for longer than the timeout.
        """
        self._comm.stands(_WAITING, self._op)
        try:
            counts = self._transfer.wait()
        except RuntimeError as error:
            raise self._comm.failure(self._op, self._issued_s, error) from error
        self._comm.stands("past", self._op)
        return counts


class Flight:
    """One op's messages on the wire."""

    def __init__(self, comm: Comm, op: Op, received: tuple[torch.Tensor, ...], transfers: list[Transfer]) -> None:
        self.received = received
        self._comm = comm
        self._op = op
        self._transfers = transfers
        self._issued_s = time.monotonic()

    def in_flight(self) -> bool:
        """Whether any message is still on its way; never blocks."""
        return not all(transfer.done() for transfer in self._transfers)

    def land(self) -> tuple[torch.Tensor, ...]:
        """Waits, and returns the received tensors, each [M, ...].

        Raises:
            PeerError: a peer is gone or silent for longer than the timeout.
        """
        self._comm.stands(_WAITING, self._op)
        try:
            for transfer in self._transfers:
                transfer.wait()
        except RuntimeError as error:
            raise self._comm.failure(self._op, self._issued_s, error) from error
        self._comm.stands("past", self._op)
        return self.received


class AllToAll:
    """One all-to-all of one chunk and its mirror image in the backward pass.

    Usage: ``tensors = a.issue(*tensors)``, other work, ``tensors = a.wait(*tensors)``. Between the two the tensors
    must not be touched: they are being received.
    """

    def __init__(self, comm: Comm, op: Op, splits: RowSplits) -> None:
        self.op = op
        self._comm = comm
        self._splits = splits
        self._forward: Flight | None = None
        self._backward: Flight | None = None

    def issue(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Sends rows [N, ...] and returns where rows [M, ...] will be."""
        return _Issue.apply(self, *tensors)

    def wait(self, *received: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The received rows [M, ...], ready for use."""
        return _Wait.apply(self, *received)

    def _issue_forward(self, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        self._forward = self._comm.start(self.op, tensors, self._splits)
        return self._forward.received

    def _wait_forward(self) -> None:
        assert self._forward is not None, f"{self.op} is waited for but was not issued"
        self._forward.land()
        self._forward = None

    def _issue_backward(self, grads: tuple[torch.Tensor, ...]) -> None:
        self._backward = self._comm.start(self.op.mirrored(), grads, self._splits.reversed())

    def _wait_backward(self) -> tuple[torch.Tensor, ...]:
        assert self._backward is not None, f"{self.op.mirrored()} is waited for but was not issued"
        flight, self._backward = self._backward, None
        store = self._comm.store
        if store is None:
            return flight.land()
        if flight.received[0].is_cuda:
            # The host runs ahead of the device and can't tell when the message lands: a fixed share goes here.
            store.run_up_to_previous()
        else:
            store.fill(flight.in_flight)
        grads = flight.land()
        store.pass_all_to_all()
        return grads


class _Issue(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: AllToAll, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.exchange = exchange
        return exchange._issue_forward(tensors)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[Any, ...]:
        # The incoming gradients are placeholders: the real ones have been travelling since _Wait.backward.
        return (None, *ctx.exchange._wait_backward())


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: AllToAll, *received: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.exchange = exchange
        exchange._wait_forward()
        return tuple(rows.view_as(rows) for rows in received)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        ctx.exchange._issue_backward(grads)
        # Autograd wants gradients of the inputs' shape here; the real ones leave by the wire.
        return (None, *(grad.new_zeros(1).expand(grad.shape) for grad in grads))
