"""The thread of the forwards: whose turn it is, errors, the end of a failed step, and what is kept of a forward."""

import gc
import threading
import weakref
from collections.abc import Callable

import pytest
import torch

from megatron_lancet.features.pairing.lane import ForwardLane


def in_turns(lane: ForwardLane, log: list[str], name: str, num_waits: int) -> Callable[[], str]:
    """A forward that writes down each of its turns."""

    def run() -> str:
        for turn in range(num_waits):
            log.append(f"{name}{turn}")
            lane.end_turn()
        log.append(f"{name}{num_waits}")
        return name

    return run


def failing(lane: ForwardLane, num_waits: int, error: BaseException) -> Callable[[], None]:
    def run() -> None:
        for _ in range(num_waits):
            lane.end_turn()
        raise error

    return run


def works(lane: ForwardLane) -> bool:
    """Whether a forward of two turns runs to its end, one turn at a time."""
    log: list[str] = []
    forward = lane.add(in_turns(lane, log, "again", 1))
    lane.run_turn()
    assert log == ["again0"]
    lane.run_turn()
    return forward.is_done and forward.take_result() == "again" and lane.is_idle


def test_one_turn_runs_at_a_time_and_forwards_run_in_their_order():
    lane, log = ForwardLane(on_cuda=False), list[str]()
    first = lane.add(in_turns(lane, log, "a", 2))
    second = lane.add(in_turns(lane, log, "b", 1))
    for number, done in enumerate(["a0", "a1", "a2", "b0", "b1"], start=1):
        log.append("backward")
        lane.run_turn()
        assert log[-2:] == ["backward", done]
        assert len(log) == 2 * number
        assert (first.num_turns, second.num_turns) == (min(number, 3), max(number - 3, 0))
        assert (first.is_done, second.is_done) == (number >= 3, number == 5)
        assert lane.is_idle == (number == 5)
    assert (first.take_result(), second.take_result()) == ("a", "b")


def test_all_forwards_run_on_one_thread_which_is_not_the_callers():
    lane, threads = ForwardLane(on_cuda=False), []
    for _ in range(3):
        lane.add(lambda: threads.append((threading.current_thread(), lane.is_here)))
        lane.run_turn()
    assert len({thread for thread, _ in threads}) == 1
    assert threads[0][0] is not threading.current_thread()
    assert all(is_here for _, is_here in threads)
    assert not lane.is_here


def test_no_turn_ends_elsewhere():
    """The backward waits too, and recomputed forwards within it."""
    lane = ForwardLane(on_cuda=False)
    lane.end_turn()
    forward = lane.add(in_turns(lane, [], "a", 1))
    lane.end_turn()
    assert forward.num_turns == 0
    lane.run_turn()
    lane.end_turn()
    assert forward.num_turns == 1
    lane.run_turn()
    assert forward.is_done


@pytest.mark.parametrize("num_waits", [0, 2])
def test_error_of_forward_is_raised_where_its_turn_was_given(num_waits):
    lane = ForwardLane(on_cuda=False)
    error = KeyError("layer 3")
    forward = lane.add(failing(lane, num_waits, error))
    for _ in range(num_waits):
        lane.run_turn()
    with pytest.raises(KeyError) as raised:
        lane.run_turn()
    assert raised.value is error
    assert forward.is_done
    assert works(lane)


def test_an_error_drops_no_forward_behind_it_until_the_step_ends():
    lane = ForwardLane(on_cuda=False)
    lane.add(failing(lane, 0, ValueError("first")))
    behind = lane.add(in_turns(lane, [], "b", 0))
    with pytest.raises(ValueError, match="first"):
        lane.run_turn()
    assert not lane.is_idle
    lane.end()
    assert lane.is_idle
    assert not behind.is_done
    assert works(lane)


def test_end_before_the_first_forward_changes_nothing():
    lane = ForwardLane(on_cuda=False)
    lane.end()
    lane.end()
    assert works(lane)


def test_end_unwinds_the_running_forward_and_drops_others():
    lane, log = ForwardLane(on_cuda=False), []

    def run() -> None:
        try:
            lane.end_turn()
            log.append("continued")
        except Exception:  # noqa: BLE001 - as a model may do
            log.append("taken for an error of the model")
        finally:
            log.append("cleaned up")

    under_way, queued = lane.add(run), lane.add(lambda: log.append("queued"))
    lane.run_turn()
    lane.end()
    assert log == ["cleaned up"]
    assert under_way.is_done
    assert not queued.is_done
    assert lane.is_idle
    assert works(lane)


def test_end_unwinds_forward_that_waits_again_while_it_cleans_up():
    lane, log = ForwardLane(on_cuda=False), []

    def run() -> None:
        try:
            lane.end_turn()
        finally:
            try:
                lane.end_turn()
            finally:
                log.append("left")

    lane.add(run)
    lane.run_turn()
    lane.end()
    assert log == ["left"]
    assert works(lane)


def test_error_of_an_unwound_forward_is_not_raised_later():
    lane = ForwardLane(on_cuda=False)

    def run() -> None:
        try:
            lane.end_turn()
        finally:
            raise RuntimeError("of a step that has failed anyway")

    lane.add(run)
    lane.run_turn()
    lane.end()
    assert works(lane)


def test_a_result_is_given_once_and_nothing_of_a_forward_is_kept():
    """It holds the graph of a micro-batch; its closure the samples and the input of its stage."""
    lane = ForwardLane(on_cuda=False)
    samples = torch.ones(3)
    forward = lane.add(lambda samples=samples: samples.requires_grad_() * 2)
    lane.run_turn()
    result = forward.take_result()
    references = [weakref.ref(samples), weakref.ref(result)]
    del samples, result
    gc.collect()
    assert [reference() for reference in references] == [None] * 2
    assert forward.take_result() is None


@pytest.mark.parametrize("fails", [True, False], ids=["error", "end"])
def test_nothing_of_a_failed_step_is_kept(fails):
    lane = ForwardLane(on_cuda=False)
    samples = torch.ones(3)
    reference = weakref.ref(samples)

    def run(samples: torch.Tensor = samples) -> torch.Tensor:
        hidden = samples * 2
        lane.end_turn()
        if fails:
            raise ValueError(f"{len(hidden)} rows")
        return hidden

    forward = lane.add(run)
    lane.run_turn()
    if fails:
        with pytest.raises(ValueError, match="3 rows"):
            lane.run_turn()
    lane.end()
    assert forward.is_done
    del run, samples
    gc.collect()
    assert reference() is None
    assert works(lane)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("autocast", [True, False])
def test_forward_runs_with_settings_of_thread_that_added_it(grad, autocast):
    lane, found = ForwardLane(on_cuda=False), []

    def run() -> None:
        for _ in range(2):
            dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
            found.append((torch.is_grad_enabled(), dtype))
            lane.end_turn()

    with torch.set_grad_enabled(grad), torch.autocast("cpu", torch.float16, enabled=autocast):
        lane.add(run)
    with torch.no_grad():  # as the backward
        for _ in range(3):
            lane.run_turn()
    assert found == [(grad, torch.float16 if autocast else None)] * 2
    lane.add(lambda: found.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"))))
    lane.run_turn()
    assert found[-1] == (True, False)


def test_forwards_draw_random_numbers_in_their_order():
    """The default generator belongs to the process: a paired forward continues where the last one ended."""
    lane, drawn = ForwardLane(on_cuda=False), []

    def run() -> None:
        drawn.append(torch.rand(1))
        lane.end_turn()
        drawn.append(torch.rand(1))

    torch.manual_seed(3)
    for _ in range(2):
        lane.add(run)
        lane.run_turn()
        lane.run_turn()
    torch.manual_seed(3)
    assert torch.cat(drawn).equal(torch.cat([torch.rand(1) for _ in range(4)]))
