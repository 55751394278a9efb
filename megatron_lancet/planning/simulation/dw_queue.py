"""The weight gradients that a simulated rank has deferred: the model of ``runtime/weight_grad_store.py``."""

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron_lancet.planning.simulation.cost_model import DwCost
from megatron_lancet.schedule.ops import Op
from megatron_lancet.schedule.plan import DwPolicy, Plan


class DwTask(NamedTuple):
    """A deferred dW. It has run when ``due`` backward all-to-alls have passed."""

    layer: int
    cost: DwCost
    due: int

    @property
    def name(self) -> str:
        """As in plans and timelines."""
        return str(Op.weight_grad(self.layer or None, self.cost.name))


@dataclass(frozen=True)
class DwRules:
    """What a plan says about weight gradients.

    Attributes:
        defers: whether they are deferred at all.
        gaps: dWs that go first, by backward all-to-all.
    """

    defers: bool
    window: int
    memory_bytes: int | None
    gaps: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @staticmethod
    def of(plan: Plan) -> "DwRules":
        """Those of a plan."""
        gaps: dict[str, tuple[str, ...]] = {}
        for gap in plan.gaps:
            gaps[gap.op] = gaps.get(gap.op, ()) + gap.weight_grads
        return DwRules(plan.dw_policy is DwPolicy.FILL, plan.dw_window, plan.dw_memory_bytes, gaps)


class DwQueue:
    """Pending dWs, oldest first.

    Attributes:
        peak_bytes: the most that they kept alive.
        num_early: how many ran because memory was full.
    """

    def __init__(self, rules: DwRules) -> None:
        self._rules = rules
        self._tasks: deque[DwTask] = deque()
        self._num_passed = 0
        self._held_bytes = 0
        self.peak_bytes = 0
        self.num_early = 0

    def __len__(self) -> int:
        return len(self._tasks)

    def put(self, layer: int, cost: DwCost) -> list[DwTask]:
        """Takes one; returns what must run at once to make room, in order."""
        rules, early = self._rules, []
        if rules.memory_bytes is not None:
            while self._tasks and self._held_bytes + cost.pinned_bytes > rules.memory_bytes:
                early.append(self.take_oldest())
        self._tasks.append(DwTask(layer, cost, self._num_passed + rules.window))
        self._held_bytes += cost.pinned_bytes
        if rules.memory_bytes is not None and self._held_bytes > rules.memory_bytes:
            early.append(self.take_oldest())
        self.peak_bytes = max(self.peak_bytes, self._held_bytes)
        self.num_early += len(early)
        return early

    def take_oldest(self) -> DwTask:
        """The one that was put first."""
        task = self._tasks.popleft()
        self._held_bytes -= task.cost.pinned_bytes
        return task

    def take(self, name: str) -> DwTask | None:
        """The oldest of this name, None if there is none."""
        for index, task in enumerate(self._tasks):
            if task.name == name:
                del self._tasks[index]
                self._held_bytes -= task.cost.pinned_bytes
                return task
        return None

    def pass_all_to_all(self) -> list[DwTask]:
        """One more backward all-to-all has finished; returns what is due, in order."""
        self._num_passed += 1
        late = []
        while self._tasks and self._tasks[0].due <= self._num_passed:
            late.append(self.take_oldest())
        return late
