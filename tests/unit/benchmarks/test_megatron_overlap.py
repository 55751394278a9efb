"""Megatron's streams as threads: thread, order and overlap of each node, and which waits count as exposed."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from megatron.core.models.common.model_chunk_schedule_plan import TransformerModelChunkSchedulePlan
from megatron.core.models.common.utils import TransformerLayerNode
from megatron.core.pipeline_parallel import utils as pipeline_utils

from benchmarks.training_step import megatron_overlap
from benchmarks.training_step.megatron_overlap import StreamThreads, ThreadedStats
from megatron_lancet.training.platform.cpu import cpu_platform

MAIN, COMPUTE, COMMUNICATION = "MainThread", "megatron-compute_0", "megatron-communication_0"


class Clock:
    """Replaces the module ``time``. Tests advance it."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s


class Stats(ThreadedStats):
    """Signals that compute has started to wait."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.is_waiting = threading.Event()

    @contextmanager
    def compute_waits(self) -> Iterator[None]:
        with super().compute_waits():
            self.is_waiting.set()
            yield


class Schedule:
    """Schedule whose nodes record their threads."""

    def __init__(self) -> None:
        self.stats = Stats()
        self.clock = Clock()
        self.ran: list[tuple[str, str]] = []

    def node(
        self, name: str, communicates: bool = False, fails: bool = False, does: Callable[[], object] | None = None
    ) -> pipeline_utils.ScheduleNode:
        def forward(value: torch.Tensor) -> torch.Tensor:
            self.ran.append((name, threading.current_thread().name))
            if fails:
                raise RuntimeError(f"{name} failed")
            if does is not None:
                does()
            return value + 1

        stream = pipeline_utils.get_comm_stream if communicates else pipeline_utils.get_comp_stream
        return pipeline_utils.ScheduleNode(forward, stream, torch.cuda.Event(), name=name)

    def waits_for_the_link(self) -> None:
        """Acts as a dispatch that takes a second."""
        with self.stats.waiting("exposed_ms"):
            self.clock.now_s += 1

    def run(self, enqueue: Callable[[], Any]) -> Any:
        """Returns the result of a plan whose ``run`` calls ``enqueue``."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(TransformerModelChunkSchedulePlan, "run", staticmethod(enqueue))
            with StreamThreads(self.stats).stand_for_streams():
                return TransformerModelChunkSchedulePlan.run()


@pytest.fixture
def schedule(monkeypatch):
    with cpu_platform():
        pipeline_utils.set_streams()
        schedule = Schedule()
        monkeypatch.setattr(megatron_overlap, "time", schedule.clock)
        yield schedule


def test_nodes_run_on_their_streams_thread_and_wait_for_inputs(schedule):
    def enqueue() -> Any:
        compute, dispatch, experts = schedule.node("compute"), schedule.node("dispatch", True), schedule.node("experts")
        return experts.forward(dispatch.forward(compute.forward(torch.zeros(1))))

    assert schedule.run(enqueue).item() == 3
    assert schedule.ran == [("compute", COMPUTE), ("dispatch", COMMUNICATION), ("experts", COMPUTE)]


def test_dispatch_starts_beside_earlier_compute(schedule):
    """Megatron enqueues a forward dispatch after the experts' backward, which is not its input."""
    started = threading.Event()
    found: list[bool] = []

    def enqueue() -> Any:
        attention = schedule.node("attention")
        backward = schedule.node("experts' backward", does=lambda: found.append(started.wait()))
        dispatch = schedule.node("dispatch", True, does=started.set)
        routed = attention.forward(torch.zeros(1))
        backward.forward(torch.zeros(1))
        return dispatch.forward(routed)

    assert schedule.run(enqueue).item() == 2
    assert found == [True]


def test_weight_gradients_keep_their_place_among_the_nodes(schedule, monkeypatch):
    monkeypatch.setattr(
        TransformerLayerNode,
        "backward_dw",
        lambda node: schedule.ran.append((node.name, threading.current_thread().name)),
    )
    node = TransformerLayerNode.__new__(TransformerLayerNode)
    node.name = "dW"

    def enqueue() -> Any:
        schedule.node("backward").forward(torch.zeros(1))
        node.backward_dw()
        return schedule.node("attention's backward").forward(torch.zeros(1))

    schedule.run(enqueue)
    assert schedule.ran == [(name, COMPUTE) for name in ("backward", "dW", "attention's backward")]


def test_what_is_no_part_of_a_plan_runs_at_once(schedule):
    with StreamThreads(schedule.stats).stand_for_streams():
        assert schedule.node("loss").forward(torch.zeros(1)).item() == 1
    assert schedule.ran == [("loss", MAIN)]


def test_waits_are_exposed_while_compute_waits_for_the_result(schedule):
    def sends() -> None:
        assert schedule.stats.is_waiting.wait()
        schedule.waits_for_the_link()

    def enqueue() -> Any:
        return schedule.node("experts").forward(schedule.node("dispatch", True, does=sends).forward(torch.zeros(1)))

    assert schedule.run(enqueue).item() == 2
    assert schedule.stats.take().exposed_ms == 1e3


def test_waits_beside_compute_are_not_exposed(schedule):
    sent = threading.Event()

    def sends() -> None:
        schedule.waits_for_the_link()
        sent.set()

    def enqueue() -> Any:
        dispatched = schedule.node("dispatch", True, does=sends).forward(torch.zeros(1))
        schedule.node("compute", does=lambda: sent.wait()).forward(torch.zeros(1))
        return schedule.node("experts").forward(dispatched)

    assert schedule.run(enqueue).item() == 2
    assert sent.is_set()
    assert schedule.stats.take().exposed_ms == 0


def test_communication_keeps_the_order_in_which_it_was_enqueued(schedule):
    def enqueue() -> Any:
        sent = [schedule.node(name, True).forward(torch.zeros(1)) for name in ("first", "second", "third")]
        return [schedule.node("compute").forward(one) for one in reversed(sent)]

    assert [one.result().item() for one in schedule.run(enqueue)] == [2, 2, 2]
    assert [name for name, thread in schedule.ran if thread == COMMUNICATION] == ["first", "second", "third"]


def test_errors_of_communication_end_the_schedule(schedule):
    def enqueue() -> Any:
        return schedule.node("experts").forward(schedule.node("dispatch", True, fails=True).forward(torch.zeros(1)))

    with pytest.raises(RuntimeError, match="dispatch failed"):
        schedule.run(enqueue)
    assert [name for name, _ in schedule.ran] == ["dispatch"]


def test_the_schedule_of_megatron_is_restored():
    def changed() -> tuple[Any, ...]:
        node = pipeline_utils.ScheduleNode
        layer = TransformerLayerNode.backward_dw
        return node._forward, node._backward, layer, TransformerModelChunkSchedulePlan.run, torch.Tensor.record_stream

    before = changed()
    with StreamThreads(ThreadedStats(torch.device("cpu"))).stand_for_streams():
        assert not set(changed()) & set(before)
    assert changed() == before
