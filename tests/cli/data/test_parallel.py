"""The parallel map keeps the order, reads lazily, and survives failing and dying workers."""

import multiprocessing
import operator
import os
import pickle
import signal
import threading
from collections.abc import Iterator

import pytest

from megatron_lancet.data.parallel import ordered_map
from megatron_lancet.errors import UsageError

NUM_WORKERS = 2


@pytest.mark.parametrize("num_workers", [1, NUM_WORKERS])
def test_parallel_results_are_in_the_order_of_the_items(num_workers: int) -> None:
    items = list(range(50))
    assert list(ordered_map(operator.neg, items, num_workers)) == [-item for item in items]


def test_parallel_work_runs_in_other_processes() -> None:
    pids = set(ordered_map(operator.call, [os.getpid] * 4, NUM_WORKERS))
    assert os.getpid() not in pids


@pytest.mark.parametrize("num_workers", [1, NUM_WORKERS])
def test_parallel_raises_the_first_failing_item(num_workers: int) -> None:
    results = ordered_map(int, ["1", "second", "third"], num_workers)
    assert next(results) == 1
    with pytest.raises(ValueError, match="second"):
        next(results)


def test_parallel_reports_a_killed_worker_and_ends_all_workers() -> None:
    with pytest.raises(UsageError, match="a worker process was killed"):
        list(ordered_map(signal.raise_signal, [signal.SIGKILL], NUM_WORKERS))
    assert multiprocessing.active_children() == []


class Dies:
    """The process that pickles an instance is killed shortly afterwards."""

    def __reduce__(self) -> tuple[type["Dies"], tuple[()]]:
        threading.Timer(0.02, signal.raise_signal, [signal.SIGKILL]).start()
        return Dies, ()


def long_result_of_a_killed_worker(number: int) -> object:
    # 256 MiB take a pipe longer than the process has left.
    return (bytes(256 << 20), Dies()) if number == 1 else number


def test_parallel_worker_killed_within_a_result_is_reported() -> None:
    with pytest.raises(UsageError, match="a worker process was killed"):
        list(ordered_map(long_result_of_a_killed_worker, range(6), NUM_WORKERS))
    assert multiprocessing.active_children() == []


def test_parallel_result_that_cannot_be_pickled_raises() -> None:
    with pytest.raises((TypeError, AttributeError, pickle.PicklingError), match="pickle"):
        list(ordered_map(make_lock, range(3), NUM_WORKERS))


def make_lock(_: int) -> object:
    return threading.Lock()


def test_parallel_closed_early_stops_reading_and_ends_workers() -> None:
    num_read = 0

    def items() -> Iterator[int]:
        nonlocal num_read
        for number in range(1000):
            num_read += 1
            yield number

    results = ordered_map(operator.neg, items(), NUM_WORKERS)
    assert next(results) == 0
    results.close()
    assert num_read < 20
    assert multiprocessing.active_children() == []
