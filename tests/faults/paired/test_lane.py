"""The forward lane when its caller is interrupted, and when the interpreter ends; without a model."""

import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from megatron_lancet.features.pairing.lane import ForwardLane


def interrupted_lane(monkeypatch, in_front_of: str) -> tuple[ForwardLane, list[str]]:
    """A lane whose caller got a KeyboardInterrupt in front of a step of giving a turn, and what its forward did."""
    lane, events = ForwardLane(on_cuda=False), []

    def forward() -> None:
        try:
            events.append("begin")
            lane.end_turn()
            events.append("second turn")
        finally:
            events.append("end")

    lane.add(forward)

    def interrupt(*_: object, **__: object) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    if in_front_of == "telling":
        wake_ups = SimpleNamespace(put=interrupt, get=lane._wake_ups[True].get)
        monkeypatch.setitem(lane._wake_ups, True, wake_ups)
    elif in_front_of == "waiting":
        monkeypatch.setattr(lane, "_wait_until", _on_main_thread(lane._wait_until, interrupt))
    with pytest.raises(KeyboardInterrupt):
        lane.run_turn()
    return lane, events


def _on_main_thread(stock, interrupt):
    def wait_until(has_turn: bool) -> None:
        if threading.current_thread() is threading.main_thread():
            interrupt()
        stock(has_turn)

    return wait_until


@pytest.mark.parametrize("in_front_of", ["telling", "waiting"])
def test_interrupted_caller_uses_the_lane_again(monkeypatch, in_front_of):
    lane, events = interrupted_lane(monkeypatch, in_front_of)
    lane.end()
    assert events == ["begin", "end"]
    assert lane.is_idle
    forward = lane.add(lambda: "result")
    lane.run_turn()
    assert forward.take_result() == "result"


def test_error_of_a_forward_ends_only_that_forward():
    lane = ForwardLane(on_cuda=False)
    first, second = lane.add(lambda: [][0]), lane.add(lambda: "result")
    with pytest.raises(IndexError):
        lane.run_turn()
    assert first.is_done
    lane.run_turn()
    assert second.take_result() == "result"


def test_forwards_that_are_queued_when_the_step_fails_never_run():
    lane, events = ForwardLane(on_cuda=False), []

    def forward() -> None:
        lane.end_turn()

    lane.add(forward)
    lane.add(lambda: events.append("queued"))
    lane.run_turn()
    lane.end()
    assert lane.is_idle
    lane.add(lambda: events.append("of the next step"))
    lane.run_turn()
    assert events == ["of the next step"]


EXIT = """
import torch
from megatron_lancet.features.pairing.lane import ForwardLane
lane = ForwardLane(on_cuda=False)

class Parked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        lane.end_turn()
        return tensor.clone()

lane.add(lambda: None)
lane.run_turn()
if {parked}:
    lane.add(lambda: Parked.apply(torch.ones(1, requires_grad=True)))
    lane.run_turn()
assert lane.is_idle is not {parked}
print("done")
"""


@pytest.mark.parametrize("parked", [False, True])
def test_interpreter_ends_without_noise_beside_a_lane(parked):
    """Also with a frame of C++ below the forward, which must not be unwound."""
    command = [sys.executable, "-X", "dev", "-W", "error::ResourceWarning", "-c", EXIT.format(parked=parked)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "done\n")
    for noise in ("Fatal Python error", "terminate called", "Exception ignored", "ResourceWarning"):
        assert noise not in done.stderr
