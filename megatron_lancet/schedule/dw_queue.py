"""When deferred weight gradients (dW) run and when their weights are reported: the rules of runtime and simulator.

A backward pass is counted in all-to-alls that it has finished. A dW that is put at count n has run by count
n + window, and a weight whose last use is marked at count n is reported at count n + window: a place that is the same
on every rank, whichever dWs a plan or a full memory lets run first.

The queue is bookkeeping only. Its methods return what has to run or to be reported now, and the caller does it.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from megatron_lancet.schedule.plan import DwPolicy, Plan


@dataclass(frozen=True)
class DwRules:
    """What a plan says about weight gradients.

    Attributes:
        window: all-to-alls over which a dW may be carried; with 0 none is deferred: each runs when it is put, and a
            weight is reported when its last use is marked, as in stock Megatron.
        memory_bytes: bound of what deferred dWs keep alive; None for no bound.
        gaps: by backward all-to-all, names of the weights whose dWs run first while it is in flight.
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
        """Those of a plan."""
        gaps: dict[str, tuple[str, ...]] = {}
        for gap in plan.gaps:
            gaps[gap.op] = gaps.get(gap.op, ()) + gap.weight_grads
        return DwRules(plan.dw_window if plan.dw_policy is DwPolicy.FILL else 0, plan.dw_memory_bytes, gaps)


AT_ONCE = DwRules(window=0)
"""Nothing is deferred."""


class DwTask(Protocol):
    """A dW that can be deferred."""

    @property
    def names(self) -> Sequence[str]:
        """Of the weights, as in plans; one GEMM may compute the dWs of several."""


class DwQueue[TaskT: DwTask, WeightT]:
    """The pending dWs of one backward pass, oldest first, and the weights that wait to be reported.

    Attributes:
        rules: that it follows.
        held_bytes: what the pending dWs keep alive.
        peak_bytes: the most that they kept alive.
        num_early: how many ran because memory was full.
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
        """Takes a dW for later; returns what has to run now, in order.

        Where memory is bounded these are as many of the oldest as make room, and then the task itself if it is larger
        than the bound. Without deferral it is the task.

        Args:
            num_bytes: memory that stays alive until the dW has run.
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
        """All dWs of ``weight`` have been put; returns the weights to report now: itself, if nothing is deferred."""
        if not self.rules.window:
            return [weight]
        self._to_report.append((self._num_passed + self.rules.window, weight))
        return []

    def begin_gap(self, op: str) -> None:
        """An all-to-all is waited for: until it has finished, the dWs that were planned for it go first."""
        self._planned = deque(self.rules.gaps.get(op, ()))

    def take_planned(self) -> TaskT | None:
        """The next dW that was planned for the gap; None if none of them is pending any more."""
        while self._planned:
            name = self._planned.popleft()
            for index, (_, num_bytes, task) in enumerate(self._tasks):
                if name in task.names:
                    # The others keep their order, so the first is still the one that is due next.
                    del self._tasks[index]
                    self.held_bytes -= num_bytes
                    return task
        return None

    def take_next(self) -> TaskT | None:
        """The dW to run in a gap: the planned ones first, then the oldest; None if none is pending."""
        if self._planned:
            task = self.take_planned()
            if task is not None:
                return task
        return self._take_oldest() if self._tasks else None

    def take_previous(self) -> TaskT | None:
        """The oldest dW that was put before the last all-to-all finished; None if there is none."""
        if self._tasks and self._tasks[0][0] < self._num_passed + self.rules.window:
            return self._take_oldest()
        return None

    def advance_window(self) -> list[TaskT]:
        """One more backward all-to-all has finished; returns the dWs that are due, in order."""
        self._num_passed += 1
        if self._planned:
            self._planned.clear()
        due = []
        while self._tasks and self._tasks[0][0] <= self._num_passed:
            due.append(self._take_oldest())
        return due

    def take_reports(self) -> list[WeightT]:
        """The weights to report, in order, once the dWs that are due have run. None of their dWs is pending then."""
        due = []
        while self._to_report and self._to_report[0][0] <= self._num_passed:
            due.append(self._to_report.popleft()[1])
        return due

    def flush(self) -> list[TaskT]:
        """The backward pass is over; returns all dWs that are left, in order."""
        left = []
        while self._tasks:
            left.append(self._take_oldest())
        return left

    def flush_reports(self) -> list[WeightT]:
        """The backward pass is over, and all dWs have run; returns all weights that were not reported, in order."""
        left = self.unreported
        self._to_report.clear()
        return left

    def _take_oldest(self) -> TaskT:
        _, num_bytes, task = self._tasks.popleft()
        self.held_bytes -= num_bytes
        return task
