"""The rules of deferred weight gradients, worked out by hand: what runs, what is reported, and when."""

from dataclasses import dataclass

import pytest

from megatron_lancet.schedule.dw_queue import DwQueue, DwRules
from megatron_lancet.schedule.plan import DwPolicy, Gap, Plan, Segment


@dataclass(frozen=True)
class Task:
    label: str

    @property
    def names(self) -> tuple[str, ...]:
        """``a+b.0`` is the first dW that weights a and b have in common."""
        return tuple(self.label.split(".")[0].split("+"))


class Queue:
    """A queue of tasks that are given by their labels."""

    def __init__(self, rules: DwRules) -> None:
        self.queue: DwQueue[Task, str] = DwQueue(rules)

    def put(self, *labels: str, num_bytes: int = 10) -> list[str]:
        return [task.label for label in labels for task in self.queue.put(Task(label), num_bytes)]

    def pending(self) -> list[str]:
        return [task.label for task in self.queue.pending]

    def advance(self) -> tuple[list[str], list[str]]:
        return [task.label for task in self.queue.advance_window()], self.queue.take_reports()


def labels(take) -> list[str]:
    """What a method gives until it gives nothing."""
    found = []
    while (task := take()) is not None:
        found.append(task.label)
    return found


def test_dw_and_its_report_are_due_after_a_window():
    queue = Queue(DwRules(window=2))
    queue.put("a.0")
    assert queue.queue.mark_last_use("a") == []
    assert queue.advance() == ([], [])
    queue.put("b.0")
    assert queue.queue.mark_last_use("b") == []
    assert queue.advance() == (["a.0"], ["a"])
    assert queue.advance() == (["b.0"], ["b"])


def test_planned_dws_of_gap_are_taken_first_and_then_oldest():
    queue = Queue(DwRules(window=9, gaps={"gap": ("b", "gone", "b", "a")}))
    queue.put("c.0", "a.0", "b.0", "a.1", "b.1", "b.2")
    queue.queue.begin_gap("gap")
    assert labels(queue.queue.take_next) == ["b.0", "b.1", "a.0", "c.0", "a.1", "b.2"]
    assert queue.queue.held_bytes == 0


def test_planned_dws_of_a_short_gap_are_not_planned_for_another():
    queue = Queue(DwRules(window=9, gaps={"gap": ("b", "b")}))
    queue.put("a.0", "b.0", "a.1", "b.1")
    queue.queue.begin_gap("gap")
    assert queue.queue.take_next() == Task("b.0")
    assert queue.advance() == ([], [])
    assert labels(queue.queue.take_planned) == []
    queue.queue.begin_gap("another")
    assert labels(queue.queue.take_next) == ["a.0", "a.1", "b.1"]


def test_dw_of_several_weights_is_found_by_each_name():
    queue = Queue(DwRules(window=9, gaps={"gap": ("bias",)}))
    queue.put("a.0", "weight+bias.0")
    queue.queue.begin_gap("gap")
    assert labels(queue.queue.take_planned) == ["weight+bias.0"]
    assert queue.pending() == ["a.0"]


def test_dws_ahead_of_a_wait_are_all_pending_ones_without_a_plan():
    queue = Queue(DwRules(window=3))
    queue.put("a.0")
    queue.advance()
    queue.put("b.0")
    assert labels(queue.queue.take_ahead) == ["a.0", "b.0"]


def test_dws_ahead_of_a_wait_are_the_planned_ones():
    queue = Queue(DwRules(window=3, gaps={"gap": ("b", "gone")}))
    queue.put("a.0", "b.0", "c.0")
    found = []
    for gap in ("gap", "another", "the last of the window"):
        queue.queue.begin_gap(gap)
        found.append(labels(queue.queue.take_ahead))
        assert queue.advance() == ([], [])
    assert found == [["b.0"], [], ["a.0", "c.0"]]


@pytest.mark.parametrize(("policy", "window"), [(DwPolicy.FILL, 3), (DwPolicy.NONE, 0)])
def test_dw_rules_are_those_of_the_plan(policy, window):
    gaps = (Gap("x", ("a",)), Gap("y", ("b",)), Gap("x", ("c", "a")))
    rules = DwRules.of(Plan((Segment(1, None, 2),), policy, 3, 100, gaps))
    assert rules == DwRules(window, 100, {"x": ("a", "c", "a"), "y": ("b",)})
    assert rules.defers == (policy is DwPolicy.FILL)
