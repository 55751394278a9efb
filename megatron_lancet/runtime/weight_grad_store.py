"""Deferred weight gradients (dW): a bounded queue that is drained while all-to-alls are in flight.

Two things are kept apart. *When a dW is computed* may depend on the clock: it is local work. *When a parameter is
reported ready* starts a gradient reduction, a collective: it happens at a fixed place in the backward pass, the
same on every rank (Lancet section 4.1 places dW; DDP's reductions beside it are ours to keep in order).
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from megatron_lancet.runtime.comm_stats import CommStats
from megatron_lancet.runtime.trace import Trace
from megatron_lancet.schedule.ops import Op
from megatron_lancet.schedule.plan import DwPolicy, Gap, Plan


class DeferredWeight:
    """A parameter whose gradient is not made by autograd but by the store.

    Attributes:
        name: for messages, for example ``L3.W.linear_fc1``.
        num_pending: its dWs that are enumerated but have not run.
        num_reported: how often it was reported ready; for tests and assertions.
    """

    def __init__(self, parameter: torch.nn.Parameter, name: str, report_ready: Callable[[], None]) -> None:
        """
        Args:
            report_ready: DDP's function for it.
        """
        self.name = name
        self.num_pending = 0
        self.num_reported = 0
        self._parameter = parameter
        self._report_ready = report_ready

    @property
    def num_bytes(self) -> int:
        """Of the gradient."""
        main_grad: torch.Tensor = self._parameter.main_grad  # type: ignore[attr-defined]
        return main_grad.nbytes

    def add_to_main_grad(self, weight_grad: torch.Tensor) -> None:
        """Adds one chunk's dW, shaped like the weight, to Megatron's gradient accumulator."""
        self._parameter.main_grad.add_(weight_grad)  # type: ignore[attr-defined]

    def add_product(self, grad_TO: torch.Tensor, input_TI: torch.Tensor, in_gemm: bool = False) -> None:
        """Computes one chunk's dW, [O, I], from T tokens and adds it to Megatron's gradient accumulator.

        Args:
            in_gemm: let the GEMM add to the gradient where the types agree. Faster, and no temporary of the weight's
                size (benchmarks/README.md), but not stock's order of additions.
        """
        main_grad: torch.Tensor = self._parameter.main_grad  # type: ignore[attr-defined]
        if in_gemm and main_grad.dtype == grad_TO.dtype == input_TI.dtype:
            main_grad.addmm_(grad_TO.t(), input_TI)
        else:
            self.add_to_main_grad(grad_TO.t().matmul(input_TI))

    def report(self) -> None:
        """Tells DDP that the gradient of this micro-batch is complete. DDP reads ``.grad`` then, and clears it."""
        assert self.num_pending == 0, f"{self.name} was to be reported with {self.num_pending} dW pending"
        parameter = self._parameter
        # A gradient that autograd made as well (a use that was not deferred) is DDP's to add. Without one DDP
        # still insists on a .grad: an expanded scalar takes no memory, and the flag keeps it from being added.
        parameter.grad_added_to_main_grad = parameter.grad is None  # type: ignore[attr-defined]
        if parameter.grad is None:
            parameter.grad = parameter.new_empty(1).expand(parameter.shape)
        self._report_ready()
        self.num_reported += 1


@dataclass(frozen=True)
class _Task:
    weights: tuple[DeferredWeight, ...]
    compute: Callable[[], None]
    num_bytes: int
    due: int

    def is_of(self, name: str) -> bool:
        """Whether it is a dW of the weight with this name."""
        return any(weight.name == name for weight in self.weights)


class WeightGradStore:
    """Queue of deferred dWs and of the parameters that wait to be reported.

    The backward pass is counted in all-to-alls that it has finished. A dW enumerated at count n has run, and its
    parameter has been reported, by count n + window; all have by the end of the backward pass. That holds whichever
    of them a plan lets run first.

    Where memory is bounded, a dW may have to run earlier. That moves no report, so ranks on which different amounts
    of memory are pinned still agree about the order of collectives.

    Attributes:
        trace: of the present step, None where nothing is recorded.
    """

    def __init__(
        self, window: int, stats: CommStats, memory_bytes: int | None = None, gaps: Sequence[Gap] = ()
    ) -> None:
        """
        Args:
            window: all-to-alls over which a dW may be carried; with 0 each runs when it is put, and a parameter is
                reported when it is enumerated, as in stock Megatron.
            memory_bytes: bound of what deferred dWs keep alive; None for no bound.
            gaps: dWs that were planned for certain all-to-alls.
        """
        self.trace: Trace | None = None
        self._stats = stats
        self._tasks: deque[_Task] = deque()
        self._to_report: deque[tuple[DeferredWeight, int]] = deque()
        self._num_passed = 0
        self._held_bytes = 0
        self._flush_is_queued = False
        self._set(window, memory_bytes, gaps)

    @classmethod
    def of(cls, plan: Plan, stats: CommStats) -> "WeightGradStore":
        """A store that runs dWs as ``plan`` says."""
        store = cls(0, stats)
        store.follow(plan)
        return store

    def follow(self, plan: Plan) -> None:
        """From the next backward pass on, run dWs as ``plan`` says.

        Raises:
            AssertionError: the last backward pass has left something behind.
        """
        self.assert_idle()
        fills = plan.dw_policy is DwPolicy.FILL
        self._set(plan.dw_window if fills else 0, plan.dw_memory_bytes, plan.gaps)

    def _set(self, window: int, memory_bytes: int | None, gaps: Sequence[Gap]) -> None:
        assert window >= 0
        assert memory_bytes is None or memory_bytes > 0
        self._window = window
        self._memory_bytes = memory_bytes
        self._planned: dict[str, tuple[str, ...]] = {}
        for gap in gaps:
            self._planned[gap.op] = (*self._planned.get(gap.op, ()), *gap.weight_grads)

    def __len__(self) -> int:
        return len(self._tasks)

    def put(self, weight: DeferredWeight, compute: Callable[[], None], num_bytes: int, *others: DeferredWeight) -> None:
        """Takes a dW for later, after running older ones if there is no room for it. Called from a backward function.

        Args:
            compute: runs the GEMM and adds the result to the gradient.
            num_bytes: memory that stays alive until then. A dW larger than the bound runs at once, after all others.
            others: further weights whose dWs the same GEMM computes.
        """
        weights = (weight, *others)
        for one in weights:
            one.num_pending += 1
        task = _Task(weights, compute, num_bytes, self._num_passed + self._window)
        if self._window == 0:
            _run(task, self.trace)
            return
        self._flush_at_end_of_backward()
        while self._tasks and not self._fits(num_bytes):
            self._run_early()
        self._tasks.append(task)
        self._held_bytes += num_bytes
        if not self._fits(0):
            self._run_early()
        self._stats.raise_to("peak_dw_bytes", self._held_bytes)

    def enumerated(self, weight: DeferredWeight) -> None:
        """Autograd is done with ``weight``: all its dWs of this backward pass have been put."""
        if self._window == 0:
            weight.report()
            return
        self._flush_at_end_of_backward()
        self._to_report.append((weight, self._num_passed + self._window))

    def fill(self, in_flight: Callable[[], bool], op: Op | None = None) -> None:
        """Runs dWs while there are any and ``in_flight()`` holds: those planned for ``op`` first, then the oldest."""
        planned = self._planned_for(op)
        while self._tasks and in_flight():
            self._run_at(next(planned, 0))
            self._stats.add("num_dw_hidden", 1)

    def run_up_to_previous(self, op: Op | None = None) -> None:
        """A fill for where nobody can watch the wire.

        Runs what was planned for ``op``, and nothing else; without planned gaps, the dWs enumerated before the last
        all-to-all finished.
        """
        if self._planned:
            for index in self._planned_for(op):
                self._run_at(index)
                self._stats.add("num_dw_hidden", 1)
            return
        while self._tasks and self._tasks[0].due < self._num_passed + self._window:
            self._run_oldest()
            self._stats.add("num_dw_hidden", 1)

    def _planned_for(self, op: Op | None) -> Iterator[int]:
        """Where the dWs that were planned for ``op`` are in the queue, as far as they are pending; each when asked."""
        if not self._planned or op is None:
            return
        for name in self._planned.get(str(op), ()):
            index = next((index for index, task in enumerate(self._tasks) if task.is_of(name)), None)
            if index is not None:
                yield index

    def pass_all_to_all(self) -> None:
        """One more backward all-to-all has finished: run what is due, report what is due."""
        if self._window == 0:
            return
        self._num_passed += 1
        while self._tasks and self._tasks[0].due <= self._num_passed:
            self._run_late()
        while self._to_report and self._to_report[0][1] <= self._num_passed:
            self._report_next()

    def flush(self) -> None:
        """Runs and reports everything: the backward pass is over."""
        self._flush_is_queued = False
        while self._tasks:
            self._run_late()
        while self._to_report:
            self._report_next()
        self._num_passed = 0
        self.assert_idle()

    def assert_idle(self) -> None:
        """Called wherever no backward pass is running: everything that was put has run and has been reported.

        Raises:
            AssertionError: a dW or a report is left, with its name. The gradients of this step are wrong then.
        """
        pending = [weight.name for task in self._tasks for weight in task.weights]
        unreported = [weight.name for weight, _ in self._to_report]
        idle = not pending and not unreported and not self._flush_is_queued and self._held_bytes == 0
        assert idle, (
            f"a backward pass ended without its flush: {len(pending)} dW pending {pending[:3]}, {len(unreported)} "
            f"weights not reported {unreported[:3]}. If it raised and the run is to go on, call discard() first"
        )

    def discard(self) -> None:
        """Forgets what a failed backward pass left behind; its gradients are void anyway."""
        for task in self._tasks:
            for weight in task.weights:
                weight.num_pending = 0
        self._tasks.clear()
        self._to_report.clear()
        self._held_bytes = 0
        self._num_passed = 0
        self._flush_is_queued = False

    def _flush_at_end_of_backward(self) -> None:
        if not self._flush_is_queued:
            self._flush_is_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self.flush)

    def _report_next(self) -> None:
        # Every dW put before its weight was enumerated is due no later than the report: none can be pending.
        self._to_report.popleft()[0].report()

    def _fits(self, num_bytes: int) -> bool:
        return self._memory_bytes is None or self._held_bytes + num_bytes <= self._memory_bytes

    def _run_early(self) -> None:
        self._run_oldest()
        self._stats.add("num_dw_early", 1)

    def _run_late(self) -> None:
        self._run_oldest()
        self._stats.add("num_dw_late", 1)

    def _run_oldest(self) -> None:
        self._run_at(0)

    def _run_at(self, index: int) -> None:
        """Runs one of the queue. The others keep their order, so that the first is still the one that is due next."""
        task = self._tasks[index]
        del self._tasks[index]
        self._held_bytes -= task.num_bytes
        _run(task, self.trace)


def _run(task: _Task, trace: Trace | None) -> None:
    first = task.weights[0]
    with torch.no_grad():
        if trace is None:
            task.compute()
        else:
            with trace.weight_grad(first.name, task.num_bytes, first.num_bytes):
                task.compute()
    for weight in task.weights:
        weight.num_pending -= 1
