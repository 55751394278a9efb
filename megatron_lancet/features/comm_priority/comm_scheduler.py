"""Launches gradient reductions between all-to-alls, which have priority (Lina, training part).

Reductions and backward all-to-alls share the network. The next op of the backward pass waits for an all-to-all; only
the optimizer waits for a reduction. So a bucket whose gradients are complete is not reduced at once: it is cut into
micro-ops, which a :class:`~megatron_lancet.schedule.reductions.ReductionQueue` holds until they may be launched.
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
        num_bytes: bytes of the gradients that it reduces.
    """

    num_bytes: int

    def launch(self) -> None:
        """Launches it without waiting."""

    def wait(self) -> None:
        """Makes the reduced gradients visible to the compute that follows. Call after the launch."""

    def release_if_done(self) -> bool:
        """Releases its buffers if it has certainly completed, and returns whether it has. Never blocks."""


class PendingReduction:
    """A bucket group's reduction, which Megatron's DDP holds until the optimizer needs the gradients."""

    def __init__(self, scheduler: "CommScheduler") -> None:
        self.micro_ops: list[MicroOp] = []
        self._scheduler = scheduler

    def wait(self) -> None:
        """Launches what is still queued and waits. Called on all ranks in the same order."""
        self._scheduler.finish(self)


class CommScheduler:
    """Launches a rank's micro-ops; ``micro_ops`` says how reductions are cut."""

    def __init__(self, micro_ops: MicroOps, stats: CommStats) -> None:
        self.micro_ops = micro_ops
        self._stats = stats
        self._queue: ReductionQueue[MicroOp] = ReductionQueue(micro_ops.chunk_bytes)
        self._launched: deque[MicroOp] = deque()

    def expect_backward(self) -> None:
        """Announces the backward all-to-all of a forward one."""
        self._queue.expect_backward()

    def issued(self) -> None:
        """Called before a backward all-to-all is launched."""
        self._queue.issue()

    def passed(self, op: Op) -> None:
        """Called after the wait for a backward all-to-all, when the reductions that it completes have been put."""
        micro_ops = self._queue.advance(op.kind)
        if not self._queue.is_at_end:
            self._stats.add("num_grad_micro_ops_between", len(micro_ops))
        self._launch(micro_ops)

    def put(self, reduction: PendingReduction) -> None:
        """Queues a reduction whose gradients are complete."""
        self._launch(self._queue.put(reduction.micro_ops))

    def finish(self, reduction: PendingReduction) -> None:
        """Waits for a reduction after launching all that is queued, which keeps the order of the queue."""
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
            # Releasing memory is local to this rank: it moves no collective.
            while self._launched and self._launched[0].release_if_done():
                self._launched.popleft()
            micro_op.launch()
            self._launched.append(micro_op)
            self._stats.add("num_grad_micro_ops", 1)
            self._stats.add("grad_bytes", micro_op.num_bytes)
