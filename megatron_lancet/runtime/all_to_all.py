"""An all-to-all as two autograd functions, launch and wait.

Autograd runs nodes in the reverse order of their creation. So the backward of *wait* launches the gradient's
all-to-all, the backward of *launch* waits for it, and what other chunks created between the two runs while it is in
flight: the backward pass is the mirrored pipeline, without a schedule of its own.
"""

from typing import Any

import torch

from megatron_lancet.runtime.comm import Comm
from megatron_lancet.runtime.exchange import Handle, LocalExchange, PendingSplits, RowSplits
from megatron_lancet.schedule.ops import Op, OpKind
from megatron_lancet.schedule.turns import ROWS_NEEDED_BY


class AllToAll:
    """One all-to-all of one chunk and its mirror image in the backward pass.

    Usage: ``ticket = a.launch(*tensors)``, other work, ``tensors = a.wait(ticket)``. The ticket holds no data: it
    is the edge between the two nodes of the graph while the number of received rows is unknown.
    """

    def __init__(
        self, comm: Comm, op: Op, splits: RowSplits | PendingSplits | None, ends_backward_op: bool = True
    ) -> None:
        """
        Args:
            splits: rows by rank; if they are pending, the message is launched when they are known. None if the rows
                stay in place in both directions: the message keeps its places in the order of turns, and sends nothing.
            ends_backward_op: whether its launch in the backward is the end of the op that makes its gradients. Of the
                messages with the parts of one op's result, it is the first message's.
        """
        self.op = op
        self._comm = comm
        self._splits = splits
        self._ends_backward_op = ends_backward_op
        self._forward: Handle | None = None
        self._backward: Handle | None = None

    def launch(self, *tensors: torch.Tensor) -> torch.Tensor:
        """Sends rows [N, ...] of each tensor, which must not be changed afterwards, and returns the ticket.

        With pending splits N may be larger than the number of rows that are sent. Rows that stay have the gradient 0.
        """
        ticket: torch.Tensor = _Launch.apply(self, *tensors)
        if ticket.requires_grad and self._comm.scheduler is not None:
            self._comm.scheduler.expect_backward()
        return ticket

    def wait(self, ticket: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns the received rows, [M, ...] of each tensor. A backward paired with this forward runs first."""
        is_sent = self.wait_for_launch()
        assert is_sent, f"the rows of {self.op} were not sent in one message"
        return self.received(ticket)

    def wait_for_launch(self) -> bool:
        """Waits until the splits are known, before :meth:`received`. A backward paired with this forward runs first.

        Returns:
            Whether the rows are sent in this message. Else the caller moves them, and calls :meth:`return_gradients`.
        """
        self._comm.progress.forward_waits()
        assert self._forward is not None, f"{self.op} is waited for but was not launched"
        return not self._forward.is_left_out()

    def received(self, ticket: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Waits for the rows, [M, ...] of each tensor."""
        return _Wait.apply(self, ticket)

    def return_gradients(self, *grads: torch.Tensor) -> None:
        """Hands over the gradients of the rows that were launched, where they have not come by this message."""
        if self._comm.scheduler is not None:
            self._comm.scheduler.issued()
        self._backward = LocalExchange(grads)
        self._trace_launch_backward()

    def _wait_forward(self) -> tuple[torch.Tensor, ...]:
        assert self._forward is not None, f"{self.op} is waited for but was not launched"
        handle, self._forward = self._forward, None
        return wait_in_forward(self._comm, self.op, handle)

    def _launch_backward(self, grads: tuple[torch.Tensor, ...]) -> None:
        if self._splits is None:
            self.return_gradients(*grads)
            return
        splits = self._splits if isinstance(self._splits, RowSplits) else self._splits.splits()
        assert splits is not None, f"{self.op} was left out"
        if self._comm.scheduler is not None:
            self._comm.scheduler.issued()
        self._backward = self._comm.launch(self.op.mirrored(), grads, splits.reversed())
        self._trace_launch_backward()

    def _trace_launch_backward(self) -> None:
        if self._comm.trace is not None and self._ends_backward_op:
            made_by = self.op.mirrored().with_kind(ROWS_NEEDED_BY[OpKind(self.op.kind)])
            self._comm.trace.end(str(made_by))

    def _wait_backward(self) -> tuple[torch.Tensor, ...]:
        assert self._backward is not None, f"{self.op.mirrored()} is waited for but was not launched"
        handle, self._backward = self._backward, None
        self._comm.progress.backward_waits()
        grads = wait_in_backward(self._comm, self.op.mirrored(), handle)
        if self._comm.store is not None:
            self._comm.store.advance_window()
        if self._comm.scheduler is not None:
            self._comm.scheduler.passed(self.op)
        return grads


def wait_in_forward(comm: Comm, op: Op, handle: Handle) -> tuple[torch.Tensor, ...]:
    """Returns the rows of a forward's message, behind dWs of a backward paired with this forward."""
    if comm.store is not None:
        if handle.on_cuda:
            comm.store.run_planned(op)
        else:
            comm.store.fill(handle.in_flight, op)
    return handle.wait()


def wait_in_backward(comm: Comm, op: Op, handle: Handle) -> tuple[torch.Tensor, ...]:
    """Returns the rows of a backward's message, behind dWs."""
    if comm.store is not None:
        if handle.on_cuda:
            # The host runs ahead of the device and can't tell when the message arrives.
            comm.store.run_ahead(op)
        else:
            comm.store.fill(handle.in_flight, op)
    return handle.wait()


class _Launch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: AllToAll, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.exchange, ctx.num_rows = exchange, tensors[0].size(0)
        comm, splits = exchange._comm, exchange._splits
        if splits is None:
            exchange._forward = LocalExchange(tensors)
        elif isinstance(splits, RowSplits):
            exchange._forward = comm.launch(exchange.op, tensors, splits)
        else:
            exchange._forward = comm.launch_when_known(exchange.op, tensors, splits)
        return tensors[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[Any, ...]:
        # The ticket's gradient is empty: _Wait.backward launched the all-to-all of the real gradients.
        grads = ctx.exchange._wait_backward()
        num_others = ctx.num_rows - grads[0].size(0)
        if num_others:
            grads = tuple(torch.cat((grad, grad.new_zeros((num_others, *grad.shape[1:])))) for grad in grads)
        return (None, *grads)


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: AllToAll, ticket: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.exchange = exchange
        return exchange._wait_forward()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        ctx.exchange._launch_backward(grads)
        return None, grads[0].new_empty(0)
