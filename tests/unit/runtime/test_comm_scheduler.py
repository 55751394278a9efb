"""Where micro-ops of gradient reductions leave, from the order of all-to-alls alone."""

from collections.abc import Callable

import pytest

from megatron_lancet.features.comm_priority.comm_scheduler import CommScheduler, PendingReduction
from megatron_lancet.schedule.ops import Op, Phase
from megatron_lancet.schedule.reductions import MicroOps
from tests.fakes import MicroOp, cpu_stats


class Backward:
    """Two layers' backward pass, one chunk."""

    def __init__(self, num_all_to_alls: int = 4) -> None:
        self.stats = cpu_stats()
        self.scheduler = CommScheduler(MicroOps(100), self.stats)
        self.log: list[str] = []
        for _ in range(num_all_to_alls):
            self.scheduler.expect_backward()

    def put(self, **parts: int) -> PendingReduction:
        reduction = PendingReduction(self.scheduler)
        reduction.micro_ops += [
            MicroOp(name, num_bytes, self.log.append, self._logs("wait"), self._logs("release"))
            for name, num_bytes in parts.items()
        ]
        self.scheduler.put(reduction)
        return reduction

    def _logs(self, verb: str) -> Callable[[str], None]:
        return lambda name: self.log.append(f"{verb} {name}")

    def exchange(self, kind: str) -> None:
        self.scheduler.issued()
        self.passed(kind)

    def passed(self, kind: str) -> None:
        self.scheduler.passed(Op(2, 0, Phase.FORWARD, kind))


def test_reductions_are_launched_after_each_all_to_all():
    backward = Backward()
    backward.put(a=100, b=60, c=40, d=30)
    assert backward.log == []
    backward.exchange("combine")
    assert backward.log == ["a"]
    backward.exchange("dispatch")
    assert backward.log == ["a", "b", "c"]
    backward.exchange("combine")
    assert backward.log == ["a", "b", "c", "d"]
    backward.put(e=10)
    backward.exchange("dispatch")
    assert backward.log == ["a", "b", "c", "d", "e"]
    backward.put(f=100)  # ready after the last all-to-all
    assert backward.log[-1] == "f"
    backward.scheduler.end_step()
    times = backward.stats.take()
    assert (times.num_grad_micro_ops, times.num_grad_micro_ops_between, times.grad_bytes) == (6, 4, 340)


def test_small_reductions_are_launched_together():
    backward = Backward()
    backward.put(a=30, b=30, c=40, d=10)
    backward.exchange("combine")
    assert backward.log == ["a", "b", "c"]


def test_no_reduction_is_launched_while_an_all_to_all_is_pending():
    backward = Backward(6)
    backward.put(a=10)
    backward.scheduler.issued()
    backward.exchange("dispatch")
    assert backward.log == []
    backward.passed("dispatch")
    assert backward.log == ["a"]


def test_wait_launches_remaining_reductions_in_order():
    backward = Backward()
    first = backward.put(a=100, b=100)
    second = backward.put(c=100)
    second.wait()
    first.wait()
    assert backward.log == ["a", "b", "c", "wait c", "wait a", "wait b"]


def test_memory_of_completed_reductions_is_released():
    backward = Backward(0)
    reduction = backward.put(a=100)
    reduction.micro_ops[0].done = True
    backward.put(b=100, c=100)
    assert backward.log == ["a", "release a", "b", "c"]


def test_end_of_step_refuses_reductions_that_were_not_launched():
    backward = Backward()
    backward.put(a=100)
    with pytest.raises(AssertionError, match="1 gradient micro-ops not launched"):
        backward.scheduler.end_step()


def test_end_of_step_forgets_forward_passes_without_backward():
    backward = Backward()
    backward.scheduler.end_step()
    backward.put(a=100)
    assert backward.log == ["a"]


def test_nothing_is_launched_between_two_hops():
    backward = Backward(6)
    backward.put(a=100, b=100, c=100)
    backward.exchange("node_combine")
    assert backward.log == []
    backward.exchange("local_combine")
    assert backward.log == ["a"]
    backward.exchange("local_dispatch")
    assert backward.log == ["a"]
    backward.exchange("node_dispatch")
    assert backward.log == ["a", "b"]
