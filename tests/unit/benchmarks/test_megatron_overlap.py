"""Megatron's communication stream as a thread: what it runs, in which order, and which waits count as exposed."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from megatron.core.pipeline_parallel import utils as pipeline_utils

from benchmarks.training_step import megatron_overlap
from benchmarks.training_step.megatron_overlap import CommThread, ThreadedStats
from megatron_lancet.training.platform.cpu import cpu_platform


class Stats(ThreadedStats):
    """Its clock stands still until the test moves it, and it tells when the main thread waits for the other one."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.now_s = 100.0
        self.main_waits = threading.Event()

    @contextmanager
    def main_thread_waits(self) -> Iterator[None]:
        with super().main_thread_waits():
            self.main_waits.set()
            yield


class Schedule:
    """Nodes of a schedule that note what ran on which thread; communication waits like a transport.

    Attributes:
        message: what happens while a communication node waits for its message.
    """

    def __init__(self) -> None:
        self.stats = Stats()
        self.ran: list[tuple[str, bool]] = []
        self.message: Callable[[], None] = lambda: None

    def node(self, name: str, communicates: bool = False, fails: bool = False) -> pipeline_utils.ScheduleNode:
        def forward(value: torch.Tensor) -> torch.Tensor:
            self.ran.append((name, threading.current_thread() is threading.main_thread()))
            if fails:
                raise RuntimeError(f"{name} failed")
            if communicates:
                with self.stats.waiting("exposed_ms"):
                    self.message()
            return value + 1

        stream = pipeline_utils.get_comm_stream if communicates else pipeline_utils.get_comp_stream
        return pipeline_utils.ScheduleNode(forward, stream, torch.cuda.Event(), name=name)

    def pass_ms(self, ms: float) -> None:
        self.stats.now_s += ms / 1e3


@pytest.fixture
def schedule(monkeypatch):
    with cpu_platform():
        pipeline_utils.set_streams()
        schedule = Schedule()
        clock = SimpleNamespace(perf_counter=lambda: schedule.stats.now_s)
        monkeypatch.setattr(megatron_overlap, "time", clock)
        with CommThread(schedule.stats).runs_communication():
            yield schedule


def test_communication_nodes_run_on_the_thread_and_their_users_wait(schedule):
    def arrive() -> None:
        schedule.stats.main_waits.wait()
        schedule.pass_ms(200)

    schedule.message = arrive
    compute, dispatch, experts = schedule.node("compute"), schedule.node("dispatch", True), schedule.node("experts")
    value = experts.forward(dispatch.forward(compute.forward(torch.zeros(1))))
    assert value.item() == 3
    assert schedule.ran == [("compute", True), ("dispatch", False), ("experts", True)]
    assert schedule.stats.take().exposed_ms == pytest.approx(200)


def test_waits_beside_compute_are_not_exposed(schedule):
    schedule.message = lambda: schedule.pass_ms(200)
    sent: Future = schedule.node("dispatch", True).forward(torch.zeros(1))
    sent.result()  # while the main thread computes
    schedule.pass_ms(100)
    assert schedule.node("experts").forward(sent).item() == 2
    assert schedule.stats.take().exposed_ms == 0


def test_the_part_of_a_wait_that_compute_does_not_cover_is_exposed(schedule):
    begun = threading.Event()

    def arrive() -> None:
        begun.set()
        schedule.stats.main_waits.wait()
        schedule.pass_ms(200)

    schedule.message = arrive
    sent = schedule.node("dispatch", True).forward(torch.zeros(1))
    begun.wait()
    schedule.pass_ms(100)  # the main thread computes
    assert schedule.node("experts").forward(sent).item() == 2
    assert schedule.stats.take().exposed_ms == pytest.approx(200)


def test_communication_keeps_the_order_in_which_it_was_launched(schedule):
    sent = [schedule.node(name, True).forward(torch.zeros(1)) for name in ("first", "second", "third")]
    assert [schedule.node("compute").forward(one).item() for one in reversed(sent)] == [2, 2, 2]
    assert [name for name, on_main in schedule.ran if not on_main] == ["first", "second", "third"]


def test_errors_of_communication_reach_the_node_that_needs_it(schedule):
    sent = schedule.node("dispatch", True, fails=True).forward(torch.zeros(1))
    with pytest.raises(RuntimeError, match="dispatch failed"):
        schedule.node("experts").forward(sent)


def test_the_schedule_of_megatron_is_restored():
    before = pipeline_utils.ScheduleNode._forward, pipeline_utils.ScheduleNode._backward, torch.Tensor.record_stream
    with CommThread(ThreadedStats(torch.device("cpu"))).runs_communication():
        assert pipeline_utils.ScheduleNode._forward is not before[0]
    after = pipeline_utils.ScheduleNode._forward, pipeline_utils.ScheduleNode._backward, torch.Tensor.record_stream
    assert after == before
