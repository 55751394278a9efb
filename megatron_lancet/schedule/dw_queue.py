"""Rules of deferred weight gradients (dW), for runtime and simulator: when they run and when weights are reported.

Progress of a backward pass is counted in finished all-to-alls. A dW that is put at count n has run by count n + window,
and a weight whose last use is marked at count n is reported at count n + window. That place is the same on every rank,
whichever dWs run earlier because of planned gaps or full memory.

The queue is bookkeeping only: its methods return the dWs to run or the weights to report now, and the caller does it.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from megatron_lancet.schedule.plan import DwPolicy, Plan


@dataclass(frozen=True)
class DwRules:
    """The part of a plan that concerns weight gradients.

    Attributes:
        window: number of all-to-alls that may finish before a deferred dW has run. With 0 none is deferred: each runs
            when it is put, and a weight is reported when its last use is marked, as in stock Megatron.
        memory_bytes: bound on the memory that deferred dWs keep alive; None for no bound.
        gaps: by backward all-to-all, names of the dWs that run first while it is waited for. Where the host can't see
            when a message arrives (CUDA), only those run there besides that would be due behind it.
    """

    window: int
    memory_bytes: int | None = None
    gaps: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.window >= 0
        assert self.memory_bytes is None or self.memory_bytes > 0

    @property
    def defers(self) -> bool:
        """Whether dWs are deferred at all."""
        return self.window > 0

    @staticmethod
    def of(plan: Plan) -> "DwRules":
        """The rules of a plan."""
        gaps: dict[str, tuple[str, ...]] = {}
        for gap in plan.gaps:
            gaps[gap.op] = gaps.get(gap.op, ()) + gap.weight_grads
        return DwRules(plan.dw_window if plan.dw_policy is DwPolicy.FILL else 0, plan.dw_memory_bytes, gaps)


AT_ONCE = DwRules(window=0)
"""No dW is deferred."""


class DwTask(Protocol):
    """A dW that can be deferred."""

    @property
    def names(self) -> Sequence[str]:
        """Names of the weights, as in plans; one GEMM may compute the dWs of several."""


class DwQueue[TaskT: DwTask, WeightT]:
    """The pending dWs of one backward pass, oldest first, and the weights that wait to be reported.

    Attributes:
        held_bytes: memory that the pending dWs keep alive.
        peak_bytes: maximum of ``held_bytes``.
        num_early: number of dWs that ran because memory was full.
    """

    def __init__(self, rules: DwRules) -> None:
        self.rules = rules
        self.held_bytes = 0
        self.peak_bytes = 0
        self.num_early = 0
        self._tasks: deque[tuple[int, int, TaskT]] = deque()  # due, bytes, task
        self._to_report: deque[tuple[int, WeightT]] = deque()
        self._planned: deque[str] = deque()
        self._num_passed = 0

    def __len__(self) -> int:
        return len(self._tasks)

    @property
    def pending(self) -> list[TaskT]:
        """The dWs that have not run, oldest first."""
        return [task for _, _, task in self._tasks]

    @property
    def unreported(self) -> list[WeightT]:
        """The weights that wait to be reported, in that order."""
        return [weight for _, weight in self._to_report]

    def put(self, task: TaskT, num_bytes: int) -> list[TaskT]:
        """Adds a dW; returns the dWs to run now, in order.

        With a memory bound these are the oldest ones that must make room, and the task itself if it is larger than the
        bound. Without deferral it is the task.

        Args:
            num_bytes: memory that stays alive until this dW has run.
        """
        window, bound = self.rules.window, self.rules.memory_bytes
        if not window:
            return [task]
        early = []
        if bound is not None:
            while self._tasks and self.held_bytes + num_bytes > bound:
                early.append(self._take_oldest())
        self._tasks.append((self._num_passed + window, num_bytes, task))
        self.held_bytes += num_bytes
        if bound is not None:
            if self.held_bytes > bound:
                early.append(self._take_oldest())
            self.num_early += len(early)
        if self.held_bytes > self.peak_bytes:
            self.peak_bytes = self.held_bytes
        return early

    def mark_last_use(self, weight: WeightT) -> list[WeightT]:
        """Notes that all dWs of ``weight`` were put; returns the weights to report now: itself without deferral."""
        if not self.rules.window:
            return [weight]
        self._to_report.append((self._num_passed + self.rules.window, weight))
        return []

    def begin_gap(self, op: str) -> None:
        """Notes that the all-to-all ``op`` is waited for; dWs planned for it go first until it has finished."""
        self._planned = deque(self.rules.gaps.get(op, ()))

    def take_planned(self) -> TaskT | None:
        """Removes and returns the next pending dW that was planned for the gap; None if there is none."""
        while self._planned:
            name = self._planned.popleft()
            for index, (_, num_bytes, task) in enumerate(self._tasks):
                if name in task.names:
                    # The others keep their order, so the first one is still due next.
                    del self._tasks[index]
                    self.held_bytes -= num_bytes
                    return task
        return None

    def take_next(self) -> TaskT | None:
        """Removes and returns the dW to run in a gap: planned ones first, then the oldest; None if none is pending."""
        if self._planned:
            task = self.take_planned()
            if task is not None:
                return task
        return self._take_oldest() if self._tasks else None

    def take_ahead(self) -> TaskT | None:
        """Removes and returns the next dW to run in front of a wait whose end the host can't see, or None.

        These are the dWs planned for the gap, then those that would be due behind the wait, which is never hidden. In a
        plan without gaps they are all that are pending, oldest first.
        """
        task = self.take_planned()
        if task is not None:
            return task
        is_next = bool(self._tasks) and (not self.rules.gaps or self._tasks[0][0] <= self._num_passed + 1)
        return self._take_oldest() if is_next else None

    def advance_window(self) -> list[TaskT]:
        """Notes that a backward all-to-all has finished; returns the dWs that are due, in order."""
        self._num_passed += 1
        self._planned.clear()
        due = []
        while self._tasks and self._tasks[0][0] <= self._num_passed:
            due.append(self._take_oldest())
        return due

    def take_reports(self) -> list[WeightT]:
        """Removes and returns the weights to report, in order; to be called when the dWs that are due have run."""
        due = []
        while self._to_report and self._to_report[0][0] <= self._num_passed:
            due.append(self._to_report.popleft()[1])
        return due

    def flush(self) -> list[TaskT]:
        """Ends the backward pass; returns all pending dWs, in order."""
        return [self._take_oldest() for _ in range(len(self._tasks))]

    def flush_reports(self) -> list[WeightT]:
        """Ends the backward pass after all dWs have run; returns the unreported weights, in order."""
        weights = self.unreported
        self._to_report.clear()
        return weights

    def _take_oldest(self) -> TaskT:
        _, num_bytes, task = self._tasks.popleft()
        self.held_bytes -= num_bytes
        return task
