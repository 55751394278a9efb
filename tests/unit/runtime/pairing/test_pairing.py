"""Backwards paired with forwards: the order of both, whatever the numbers of waits, and what a failed step leaves."""

import gc
import weakref
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lancet.errors import UsageError
from megatron_lancet.features.pairing.pairing import MicroBatch, Pairing
from megatron_lancet.schedule.pairing import PairedTurns


class Rank:
    """A rank whose forwards and backwards only write down their parts, one between two waits."""

    def __init__(self) -> None:
        self.pairing = Pairing(None, on_cuda=False)
        self.log: list[str] = []
        self.at_ends: list[bool] = []

    def add(self, number: int, num_waits: int, at_end: bool = False, does: int | None = None) -> MicroBatch:
        """Queues a forward.

        Args:
            does: number of waits that it has, if it is another than planned.
        """

        def forward() -> str:
            for part in range(does or num_waits):
                self.log.append(f"F{number}.{part}")
                self.at_ends.append(self.pairing.is_at_end)
                self.pairing.forward_waits()
            self.log.append(f"F{number}.{does or num_waits}")
            return f"result {number}"

        return self.pairing.add(forward, number, at_end, num_waits)

    def backward(self, number: int, num_waits: int) -> None:
        for part in range(num_waits):
            self.log.append(f"B{number}.{part}")
            self.pairing.backward_waits()
        self.log.append(f"B{number}.{num_waits}")

    def step(self, waits: list[tuple[int, int]]) -> None:
        """A step without pipeline: waits of each micro-batch's forward, and how many of them its backward has."""
        batches = [self.add(1, waits[0][0])]
        assert self.pairing.finish(batches[0]) == "result 1"
        last = len(waits) - 1
        if last:
            batches.append(self.add(2, waits[1][0]))
        for index in range(last):
            following = None
            if index + 2 <= last:
                following = self.add(index + 3, waits[index + 2][0])
                batches.append(following)
            with self.pairing.backward(batches[index], batches[index + 1], following):
                self.backward(index + 1, waits[index][1])
            assert self.pairing.finish(batches[index + 1]) == f"result {index + 2}"
        with self.pairing.backward(batches[last]):
            self.backward(last + 1, waits[last][1])
        assert not self.pairing.is_on


def test_pair_takes_turns_and_next_forward_begins_at_last_wait():
    rank = Rank()
    rank.step([(2, 2)] * 3)
    assert " ".join(rank.log) == (
        "F1.0 F1.1 F1.2 "
        "F2.0 B1.0 F2.1 B1.1 F2.2 F3.0 B1.2 "  # F3 has begun where nothing else would be in flight
        "B2.0 F3.1 B2.1 F3.2 B2.2 "
        "B3.0 B3.1 B3.2"
    )


def test_what_a_backward_leaves_of_the_forward_runs_behind_it():
    """With frozen layers it has fewer waits than planned, and never comes to the last one."""
    rank = Rank()
    rank.step([(3, 1), (3, 1), (3, 1)])
    assert " ".join(rank.log) == (
        "F1.0 F1.1 F1.2 F1.3 F2.0 B1.0 F2.1 B1.1 F2.2 F2.3 F3.0 B2.0 F3.1 B2.1 F3.2 F3.3 B3.0 B3.1"
    )


def test_a_stage_without_messages_runs_one_after_the_other():
    rank = Rank()
    rank.step([(0, 0)] * 3)
    assert " ".join(rank.log) == "F1.0 F2.0 B1.0 F3.0 B2.0 B3.0"


_WAITS = st.integers(0, 8)
_MICRO_BATCH = st.tuples(_WAITS, _WAITS).map(lambda pair: (max(pair), min(pair)))


@pytest.fixture(scope="module")
def ranks() -> tuple[Rank, Rank]:
    """Two ranks for all examples of a property: a lane's thread stays to the end of its process."""
    return Rank(), Rank()


@given(st.lists(_MICRO_BATCH, min_size=1, max_size=6))
def test_every_part_runs_once_and_alike_on_every_rank(ranks, waits):
    one, other = ranks
    one.log.clear()
    other.log.clear()
    one.step(waits)
    other.step(waits)
    assert one.log == other.log
    expected = [f"F{n}.{part}" for n, (forward, _) in enumerate(waits, 1) for part in range(forward + 1)]
    assert [part for part in one.log if part.startswith("F")] == expected
    expected = [f"B{n}.{part}" for n, (_, backward) in enumerate(waits, 1) for part in range(backward + 1)]
    assert [part for part in one.log if part.startswith("B")] == expected
    for n in range(1, len(waits)):  # at most one forward has begun next to a micro-batch that lives
        assert one.log.index(f"F{n}.{waits[n - 1][0]}") < one.log.index(f"F{n + 1}.0") < one.log.index(f"B{n}.0") + 1


@given(_WAITS, st.integers(1, 8))
def test_a_pair_runs_by_the_rule(ranks, num_forward_waits, num_backward_waits):
    rank, _ = ranks
    rank.log.clear()
    ended = rank.add(1, num_backward_waits)
    rank.pairing.finish(ended)
    beside = rank.add(2, num_forward_waits)
    with rank.pairing.backward(ended, beside):
        rank.backward(1, num_backward_waits)
    rank.pairing.finish(beside)
    turns = PairedTurns(num_forward_waits, num_backward_waits)
    for place in range(num_backward_waits + 1):
        before = rank.log[: rank.log.index(f"B1.{place}")]
        assert sum(part.startswith("F2.") for part in before) == turns.done_by(place)


@pytest.mark.parametrize("does", [1, 3])
def test_another_number_of_waits_than_planned_is_an_error(does):
    rank = Rank()
    with pytest.raises(
        UsageError, match=rf"runs the model once, in training mode.* took {does + 1} turns, and 3 were planned"
    ):
        rank.pairing.finish(rank.add(1, 2, does=does))


def test_each_forward_knows_whether_it_is_at_end_while_it_runs():
    rank = Rank()
    first = rank.add(1, 1, at_end=True)
    rank.pairing.finish(first)
    middle, last = rank.add(2, 1), rank.add(3, 1, at_end=True)
    with rank.pairing.backward(first, middle, last):
        rank.backward(1, 1)
    rank.pairing.finish(middle)
    with rank.pairing.backward(middle, last):
        rank.backward(2, 1)
    rank.pairing.finish(last)
    assert rank.at_ends == [True, False, True]


def fails_in_backward(rank: Rank) -> None:
    ended = rank.add(1, 2)
    rank.pairing.finish(ended)
    with rank.pairing.backward(ended, rank.add(2, 2), rank.add(3, 2)):
        rank.pairing.backward_waits()
        raise ValueError("failed")


def fails_beside_backward(rank: Rank) -> None:
    def forward() -> None:
        rank.pairing.forward_waits()
        raise ValueError("failed")

    ended = rank.add(1, 2)
    rank.pairing.finish(ended)
    with rank.pairing.backward(ended, rank.pairing.add(forward, 2, False, 2)):
        rank.backward(1, 2)


def fails_between(rank: Rank) -> None:
    ended, beside = rank.add(1, 2), rank.add(2, 2)
    rank.pairing.finish(ended)
    with rank.pairing.backward(ended, beside):
        rank.pairing.backward_waits()
    raise ValueError("failed")


@pytest.mark.parametrize("fails", [fails_in_backward, fails_beside_backward, fails_between])
def test_another_step_runs_after_a_failed_one(fails: Callable[[Rank], None]):
    rank = Rank()
    with pytest.raises(ValueError, match="failed"):
        fails(rank)
    rank.pairing.end()
    assert not rank.pairing.is_on
    rank.log.clear()
    rank.step([(2, 2)] * 3)
    other = Rank()
    other.step([(2, 2)] * 3)
    assert rank.log == other.log


def test_the_results_of_a_step_are_not_kept():
    """A result holds the graph of a micro-batch. At most two of them live at a time."""

    class Graph:
        pass

    pairing = Pairing(None, on_cuda=False)
    graphs: list[weakref.ref[Graph]] = []

    def forward() -> Graph:
        graph = Graph()
        graphs.append(weakref.ref(graph))
        return graph

    num_alive = []
    ended = pairing.add(forward, 1, True, 0)
    output = pairing.finish(ended)
    for number in range(2, 5):
        beside = pairing.add(forward, number, False, 0)
        with pairing.backward(ended, beside):
            del output
            gc.collect()
            num_alive.append(sum(graph() is not None for graph in graphs))
        output = pairing.finish(beside)
        ended = beside
    assert num_alive == [1, 1, 1]
    del output
    gc.collect()
    assert all(graph() is None for graph in graphs)
