"""Gradient reductions between all-to-alls: all-to-alls go first (Lina, training part).

Reductions and backward all-to-alls share the wire. Who waits for an all-to-all is the next op of the backward pass;
nobody waits for a reduction before the optimizer. So a bucket whose gradients are complete is not reduced at once: it
is cut into micro-ops, which wait in a :class:`~megatron_lancet.schedule.reductions.ReductionQueue` for a place; that
says where they may be launched. The scheduler launches them, and lets go of their memory.
"""

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from megatron_lancet.runtime.comm_stats import CommStats
from megatron_lancet.schedule.ops import Op
from megatron_lancet.schedule.reductions import MicroOps, ReductionQueue


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
        self._queue: ReductionQueue[MicroOp] = ReductionQueue(micro_ops.chunk_bytes)
        self._launched: deque[MicroOp] = deque()

    def expect_backward(self) -> None:
        """An all-to-all of the forward pass has one to match in the backward pass."""
        self._queue.expect_backward()

    def issued(self) -> None:
        """A backward all-to-all starts."""
        self._queue.issue()

    def passed(self, op: Op) -> None:
        """A backward all-to-all was waited for, and what it made ready was put."""
        micro_ops = self._queue.advance(op.kind)
        if not self._queue.is_at_end:
            self._stats.add("num_grad_micro_ops_between", len(micro_ops))
        self._launch(micro_ops)

    def put(self, reduction: PendingReduction) -> None:
        """Takes a reduction whose gradients are complete."""
        self._launch(self._queue.put(reduction.micro_ops))

    def finish(self, reduction: PendingReduction) -> None:
        """Waits for a reduction; what is queued is launched before, so that the order stays that of the queue."""
        self._launch(self._queue.take_all())
        with self._stats.waiting("grad_exposed_ms"):
            for micro_op in reduction.micro_ops:
                micro_op.wait()

    def end_step(self) -> None:
        """Called between two steps.

        Raises:
            AssertionError: gradients were put and never waited for, so the optimizer has used wrong ones.
        """
        assert not len(self._queue), f"a step ended with {len(self._queue)} gradient micro-ops not launched"
        self._queue.forget_expected()
        self._launched.clear()

    def _launch(self, micro_ops: Sequence[MicroOp]) -> None:
        for micro_op in micro_ops:
            # Their memory is this rank's own affair: when it is let go moves no collective.
            while self._launched and self._launched[0].release_if_done():
                self._launched.popleft()
            micro_op.launch()
            self._launched.append(micro_op)
            self._stats.add("num_grad_micro_ops", 1)
            self._stats.add("grad_bytes", micro_op.num_bytes)
