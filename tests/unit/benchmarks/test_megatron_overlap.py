"""Megatron's communication stream as a thread: what it runs, in which order, and which waits count as exposed."""

import threading
import time

import pytest
import torch
from megatron.core.pipeline_parallel import utils as pipeline_utils

from benchmarks.training_step.megatron_overlap import CommThread, ThreadedStats
from megatron_lancet.training.platform.cpu import cpu_platform

WAIT_S = 0.2


class Schedule:
    """Nodes of a schedule that note what ran on which thread; communication waits like a transport."""

    def __init__(self) -> None:
        self.stats = ThreadedStats(torch.device("cpu"))
        self.ran: list[tuple[str, bool]] = []

    def node(self, name: str, communicates: bool = False, fails: bool = False) -> pipeline_utils.ScheduleNode:
        def forward(value: torch.Tensor) -> torch.Tensor:
            self.ran.append((name, threading.current_thread() is threading.main_thread()))
            if fails:
                raise RuntimeError(f"{name} failed")
            if communicates:
                with self.stats.waiting("exposed_ms"):
                    time.sleep(WAIT_S)
            return value + 1

        stream = pipeline_utils.get_comm_stream if communicates else pipeline_utils.get_comp_stream
        return pipeline_utils.ScheduleNode(forward, stream, torch.cuda.Event(), name=name)


@pytest.fixture
def schedule():
    with cpu_platform():
        pipeline_utils.set_streams()
        schedule = Schedule()
        with CommThread(schedule.stats).runs_communication():
            yield schedule


def test_communication_nodes_run_on_the_thread_and_their_users_wait(schedule):
    compute, dispatch, experts = schedule.node("compute"), schedule.node("dispatch", True), schedule.node("experts")
    value = experts.forward(dispatch.forward(compute.forward(torch.zeros(1))))
    assert value.item() == 3
    assert schedule.ran == [("compute", True), ("dispatch", False), ("experts", True)]
    assert schedule.stats.take().exposed_ms >= 0.9e3 * WAIT_S


@pytest.mark.alone
def test_waits_beside_compute_are_not_exposed(schedule):
    sent = schedule.node("dispatch", True).forward(torch.zeros(1))
    time.sleep(WAIT_S + 0.1)  # stands for compute
    assert schedule.node("experts").forward(sent).item() == 2
    assert schedule.stats.take().exposed_ms == pytest.approx(0, abs=20)


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
