"""Where a rank says that it is, with a forward paired with a backward."""

from collections.abc import Callable

import pytest

from megatron_lancet.features.pairing.pairing import MicroBatch, Pairing
from megatron_lancet.runtime.comm import Comm
from megatron_lancet.schedule.ops import Op
from tests.fakes import Loopback, cpu_stats

DISPATCH, COMBINE = (Op.parse(f"L2.c0.F.{kind}") for kind in ("dispatch", "combine"))


class Run:
    """A rank whose forwards and backwards only say what they do, one message each."""

    def __init__(self) -> None:
        self.comm = Comm(Loopback(), None, cpu_stats(), own_rank=0)
        assert isinstance(self.comm.progress, Pairing)
        self.pairing = self.comm.progress
        self.seen: list[str] = []

    def see(self) -> None:
        self.seen.append(self.comm.position)

    def add(self, number: int, at_end: Callable[[], None] = lambda: None) -> MicroBatch:
        def forward() -> None:
            self.see()
            self.comm.mark("launched", DISPATCH)
            self.pairing.forward_waits()
            self.comm.mark("waiting for", DISPATCH)
            self.see()
            at_end()

        return self.pairing.add(forward, number, at_end=False, num_waits=1)

    def backward(self) -> None:
        self.see()
        self.comm.mark("launched", COMBINE.mirrored())
        self.pairing.backward_waits()
        self.comm.mark("waiting for", COMBINE.mirrored())
        self.see()


@pytest.fixture
def run():
    run = Run()
    yield run
    run.pairing.end()


WAITING_FORWARD = "waiting for L2.c0.F.dispatch (layer 2, chunk 0, forward, dispatch)"
LAUNCHED_FORWARD = "launched L2.c0.F.dispatch (layer 2, chunk 0, forward, dispatch)"
WAITING_BACKWARD = "waiting for L2.c0.I.combine (layer 2, chunk 0, backward (input gradient), combine)"
LAUNCHED_BACKWARD = "launched L2.c0.I.combine (layer 2, chunk 0, backward (input gradient), combine)"


def test_position_has_the_micro_batches_of_forward_and_backward(run):
    first, second, third = (run.add(number) for number in (1, 2, 3))
    run.pairing.finish(first)
    run.see()
    assert run.seen == [
        "before the first all-to-all of the forward of micro-batch 1",
        f"{WAITING_FORWARD}, of micro-batch 1",
        f"{WAITING_FORWARD}, of micro-batch 1",
    ]
    run.seen.clear()
    with run.pairing.backward(first, second, third):
        run.backward()
    run.see()
    before_backward = "before the first all-to-all of the backward of micro-batch 1"
    assert run.seen == [
        f"before the first all-to-all of the forward of micro-batch 2; paired with {before_backward}",
        f"{before_backward}; paired with {LAUNCHED_FORWARD}, of micro-batch 2",
        f"{WAITING_FORWARD}, of micro-batch 2; paired with {LAUNCHED_BACKWARD}, of micro-batch 1",
        f"before the first all-to-all of the forward of micro-batch 3; paired with {LAUNCHED_BACKWARD}, of micro-batch "
        "1",
        f"{WAITING_BACKWARD}, of micro-batch 1; paired with {LAUNCHED_FORWARD}, of micro-batch 3",
        f"{WAITING_BACKWARD}, of micro-batch 1; paired with {LAUNCHED_FORWARD}, of micro-batch 3",
    ]
    run.pairing.finish(third)
    assert run.comm.position == f"{WAITING_FORWARD}, of micro-batch 3"
    with run.pairing.backward(third):
        run.backward()
    run.see()
    assert run.seen[-1] == f"{WAITING_BACKWARD}, of micro-batch 3"


def test_step_without_pairs_names_no_micro_batch(run):
    run.pairing.finish(run.add(1))
    run.comm.mark("past", COMBINE)
    assert run.comm.position == "past L2.c0.F.combine (layer 2, chunk 0, forward, combine)"


def fail() -> None:
    raise ZeroDivisionError


def test_position_of_a_failed_forward_stays(run):
    first = run.add(1)
    run.pairing.finish(first)
    second = run.add(2, fail)
    with pytest.raises(ZeroDivisionError), run.pairing.backward(first, second):
        run.backward()
    run.pairing.end()
    expected = f"{WAITING_FORWARD}, of micro-batch 2; paired with {LAUNCHED_BACKWARD}, of micro-batch 1"
    assert run.comm.position == expected
    run.pairing.finish(run.add(1))
    assert run.comm.position == f"{WAITING_FORWARD}, of micro-batch 1"


def test_position_of_a_failed_backward_stays(run):
    first = run.add(1)
    run.pairing.finish(first)
    second = run.add(2)

    def failing_backward() -> None:
        with run.pairing.backward(first, second):
            run.comm.mark("past", COMBINE.mirrored())
            fail()

    with pytest.raises(ZeroDivisionError):
        failing_backward()
    run.pairing.end()
    assert run.comm.position == (
        "past L2.c0.I.combine (layer 2, chunk 0, backward (input gradient), combine), of micro-batch 1; "
        f"paired with {LAUNCHED_FORWARD}, of micro-batch 2"
    )
