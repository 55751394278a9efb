"""Gradient reductions between all-to-alls: all-to-alls go first (Lina, training part).

Reductions and backward all-to-alls share the wire. Who waits for an all-to-all is the next op of the backward pass;
nobody waits for a reduction before the optimizer. So a bucket whose gradients are complete is not reduced at once: it
is cut into micro-ops, which wait in a queue for a *place*. Places are fixed points of the backward pass:

- *between*: a backward dispatch was waited for, and nothing else is in flight: up to the next combine only attention
  and dense layers are computed. As many micro-ops leave as fit into one chunk's bytes. When a combine has been reached
  none does, until its layer's last dispatch is back: a running collective can't be preempted.
- *the end*: no further all-to-all will come in this backward pass, or the gradients are waited for: all leave.

Where in the queue a place cuts depends on sizes and on the order of autograd, never on the clock. So the order of
collectives is the same on every rank.
"""

from collections import deque
from typing import Protocol

from megatron_lancet.runtime.comm_stats import CommStats
from megatron_lancet.schedule.ops import Op, OpKind
from megatron_lancet.schedule.reductions import MicroOps


class MicroOp(Protocol):
    """A part of a gradient reduction.

    Attributes:
        num_bytes: of the gradients that it reduces.
    """

    num_bytes: int

    def launch(self) -> None:
        """Starts it; does not wait."""

    def wait(self) -> None:
        """Makes what compute does next see the reduced gradients. It was launched before."""

    def release_if_done(self) -> bool:
        """Lets go of what it keeps alive if it has certainly completed; whether it has. Never blocks."""


class PendingReduction:
    """A bucket group's reduction, as Megatron's DDP holds it until the optimizer wants the gradients."""

    def __init__(self, scheduler: "CommScheduler") -> None:
        self.micro_ops: list[MicroOp] = []
        self._scheduler = scheduler

    def wait(self) -> None:
        """Called on all ranks in the same order; launches what has found no place."""
        self._scheduler.finish(self)


class CommScheduler:
    """The queue of micro-ops of a rank.

    Attributes:
        micro_ops: how reductions are cut.
    """

    def __init__(self, micro_ops: MicroOps, stats: CommStats) -> None:
        self.micro_ops = micro_ops
        self._stats = stats
        self._queue: deque[MicroOp] = deque()
        self._launched: deque[MicroOp] = deque()
        self._num_to_come = 0
        self._num_in_flight = 0

    def expect_backward(self) -> None:
        """An all-to-all of the forward pass has one to match in the backward pass."""
        self._num_to_come += 1

    def issued(self) -> None:
        """A backward all-to-all starts."""
        self._num_in_flight += 1

    def passed(self, op: Op) -> None:
        """A backward all-to-all was waited for, and what it made ready was put."""
        self._num_in_flight -= 1
        self._num_to_come -= 1
        assert self._num_in_flight >= 0
        if self._is_over:
            self._launch_all()
        elif self._num_in_flight == 0 and self.is_place(op):
            self._launch_what_fits()

    def is_place(self, op: Op) -> bool:
        """Whether micro-ops may leave behind a backward all-to-all after which nothing is in flight."""
        return op.kind == OpKind.DISPATCH

    @property
    def _is_over(self) -> bool:
        return self._num_to_come <= 0

    def put(self, reduction: PendingReduction) -> None:
        """Takes a reduction whose gradients are complete."""
        self._queue.extend(reduction.micro_ops)
        if self._is_over:
            self._launch_all()

    def finish(self, reduction: PendingReduction) -> None:
        """Waits for a reduction; what is queued leaves before, so that the order stays that of the queue."""
        self._launch_all()
        with self._stats.waiting("grad_exposed_ms"):
            for micro_op in reduction.micro_ops:
                micro_op.wait()

    def end_step(self) -> None:
        """Called between two steps.

        Raises:
            AssertionError: gradients were put and never waited for, so the optimizer has used wrong ones.
        """
        assert not self._queue, f"a step ended with {len(self._queue)} gradient micro-ops not launched"
        # Forward passes without a backward one may have left all-to-alls that will not come.
        self._num_to_come = self._num_in_flight = 0
        self._launched.clear()

    def _launch_what_fits(self) -> None:
        room_bytes = self.micro_ops.chunk_bytes
        while self._queue and self._queue[0].num_bytes <= room_bytes:
            room_bytes -= self._queue[0].num_bytes
            self._launch_next()
            self._stats.add("num_grad_micro_ops_between", 1)

    def _launch_all(self) -> None:
        while self._queue:
            self._launch_next()

    def _launch_next(self) -> None:
        # Their memory is this rank's own affair: when it is let go moves no collective.
        while self._launched and self._launched[0].release_if_done():
            self._launched.popleft()
        micro_op = self._queue.popleft()
        micro_op.launch()
        self._launched.append(micro_op)
        self._stats.add("num_grad_micro_ops", 1)
        self._stats.add("grad_bytes", micro_op.num_bytes)
