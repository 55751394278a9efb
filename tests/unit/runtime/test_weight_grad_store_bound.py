"""The store under backward passes of all shapes: what a memory bound and planned gaps may change, and what not."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_lancet.runtime.weight_grad_store import DeferredWeight
from megatron_lancet.schedule.dw_queue import DwRules
from megatron_lancet.schedule.ops import Op, Phase
from tests.draws import examples
from tests.fakes import cpu_stats, store_without_autograd

WEIGHTS = ("a", "b", "c")


@dataclass(frozen=True)
class Put:
    weight: str
    num_bytes: int


@dataclass(frozen=True)
class LastUse:
    weight: str


@dataclass(frozen=True)
class AllToAll:
    """One during which there is time for some dWs, or nobody can tell (None), as on CUDA."""

    num_filled: int | None


def events() -> st.SearchStrategy[list[Put | LastUse | AllToAll]]:
    """A backward pass: puts and all-to-alls as they come; each weight's last use is marked once, after its last put."""
    puts = st.builds(Put, st.sampled_from(WEIGHTS), st.integers(1, 100))
    all_to_alls = st.builds(AllToAll, st.none() | st.integers(0, 3))

    def with_last_uses(order):
        last = {event.weight: i for i, event in enumerate(order) if isinstance(event, Put)}
        passes = []
        for i, event in enumerate(order):
            passes.append(event)
            if isinstance(event, Put) and last[event.weight] == i:
                passes.append(LastUse(event.weight))
        return passes

    return st.lists(puts | all_to_alls, max_size=30).map(with_last_uses)


class Run:
    """A backward pass through a store, and what happened in it.

    Attributes:
        ran: puts, by number, in the order in which their dW ran.
        collectives: all-to-alls and reports in their order.
        held: bytes that were pinned after each event.
    """

    def __init__(self, events, window: int, memory_bytes: int | None, planned: Sequence[Sequence[str]] = ()) -> None:
        """
        Args:
            planned: for the first all-to-alls, the weights whose dWs were planned for them.
        """
        self.ran: list[int] = []
        self.collectives: list[str] = []
        self.held: list[int] = []
        stats = cpu_stats()
        gaps = {str(_op(index)): tuple(names) for index, names in enumerate(planned)}
        store = store_without_autograd(DwRules(window, memory_bytes, gaps), stats)
        self.puts = [event for event in events if isinstance(event, Put)]
        weights = {name: self.weight(name) for name in WEIGHTS}
        num_put = num_passed = 0
        for event in events:
            match event:
                case Put(name, num_bytes):
                    store.put([weights[name]], lambda number=num_put: self.ran.append(number), num_bytes)
                    num_put += 1
                case LastUse(name):
                    store.mark_last_use(weights[name])
                case AllToAll(num_filled):
                    if num_filled is None:
                        store.run_ahead(_op(num_passed))
                    else:
                        polls = iter([True] * num_filled)
                        store.fill(lambda polls=polls: next(polls, False), _op(num_passed))
                    num_passed += 1
                    self.collectives.append("all-to-all")
                    store.advance_window()
            self.held.append(sum(put.num_bytes for put in self.puts[:num_put]) - self.bytes_run())
        store.flush()
        store.assert_idle()
        self.times = stats.take()

    def weight(self, name: str) -> DeferredWeight:
        parameter = torch.nn.Parameter(torch.zeros(1))
        return DeferredWeight(parameter, name, lambda: self.collectives.append(f"reduce {name}"))

    def bytes_run(self) -> int:
        return sum(self.puts[number].num_bytes for number in self.ran)


def _op(index: int) -> Op:
    return Op(1, index, Phase.INPUT_GRAD, "combine")


@pytest.mark.thorough
@examples(300)
@given(events(), st.integers(1, 5), st.integers(1, 250))
def test_dw_memory_bound_changes_only_memory_and_order_of_dws(events, window, memory_bytes):
    bounded, free = Run(events, window, memory_bytes), Run(events, window, None)
    # Each dW once and oldest first, hence also before its weight's report (asserted in DeferredWeight.report).
    assert bounded.ran == free.ran == list(range(len(bounded.puts)))
    assert bounded.collectives == free.collectives
    assert max(bounded.held, default=0) <= memory_bytes
    assert bounded.times.peak_dw_bytes == max(bounded.held, default=0)
    times = bounded.times
    assert times.num_dw_in_gaps + times.num_dw_early + times.num_dw_late == len(bounded.puts)
    assert free.times.num_dw_early == 0


@pytest.mark.thorough
@examples(300)
@given(
    events(),
    st.integers(1, 5),
    st.none() | st.integers(1, 250),
    st.lists(st.lists(st.sampled_from((*WEIGHTS, "of no model")), max_size=4), min_size=1, max_size=8),
)
def test_planned_gaps_change_only_the_order_of_dws(events, window, memory_bytes, planned):
    run, free = Run(events, window, memory_bytes, planned), Run(events, window, None)
    assert sorted(run.ran) == list(range(len(run.puts)))
    for name in WEIGHTS:
        of_weight = [number for number in run.ran if run.puts[number].weight == name]
        assert of_weight == sorted(of_weight)
    assert run.collectives == free.collectives
    assert memory_bytes is None or max(run.held, default=0) <= memory_bytes
    times = run.times
    assert times.num_dw_in_gaps + times.num_dw_early + times.num_dw_late == len(run.puts)


@given(events())
def test_dws_run_at_once_without_a_window(events):
    run = Run(events, 0, None)
    assert run.ran == list(range(len(run.puts)))
    assert set(run.held) <= {0}
    # Reported where its last use is marked, as autograd would.
    assert run.collectives == [
        f"reduce {event.weight}" if isinstance(event, LastUse) else "all-to-all"
        for event in events
        if not isinstance(event, Put)
    ]
    times = run.times
    assert times.num_dw_in_gaps + times.num_dw_early + times.num_dw_late + times.peak_dw_bytes == 0
