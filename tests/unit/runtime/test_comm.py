"""When messages that wait for token counts leave, and in which order."""

import threading
from collections.abc import Callable

import pytest
import torch

from megatron_lancet.runtime.all_to_all import AllToAll
from megatron_lancet.runtime.comm import Comm, CountsFlight, RowSplits
from megatron_lancet.runtime.comm_stats import CommStats
from megatron_lancet.runtime.transport.gloo import NoTransport
from megatron_lancet.schedule.ops import Op, Phase

SPLITS = RowSplits(sent=(2,), received=(2,))


class Wire:
    """A transport whose counts come when the test says so; everything else arrives at once."""

    is_alone = False

    def __init__(self, leaves_by_itself: bool) -> None:
        self.leaves_by_itself = leaves_by_itself
        self.log: list[str] = []

    def start(self, received, sent, receive_rows, send_rows, armed=None):
        received.copy_(sent)
        self.log.append(f"{'armed' if armed is not None else 'plain'} {int(sent[0, 0])}")
        return self

    def make_room(self, shape, like):
        return like.new_empty(shape)

    def exchange_counts(self, counts):
        self.log.append(f"counts {int(counts[0])}")
        return Counts(self)

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        """Nothing is ever late."""


class Counts:
    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.here = threading.Event()
        self.callbacks: list[Callable[[], None]] = []
        self.error: RuntimeError | None = None

    def come(self) -> None:
        self.here.set()
        for callback in self.callbacks:
            callback()

    def done(self) -> bool:
        return self.here.is_set()

    def when_done(self, callback) -> None:
        assert self.wire.leaves_by_itself
        if self.done():
            callback()
        else:
            self.callbacks.append(callback)

    def wait(self):
        if not self.wire.leaves_by_itself:
            self.wire.log.append("host waits")
        assert self.here.wait(5), "nobody sent the counts"
        if self.error is not None:
            raise self.error
        return torch.tensor([[2]]), torch.tensor([[2]])


class Splits:
    def __init__(self, counts: CountsFlight) -> None:
        self.counts = counts

    def splits(self) -> RowSplits:
        self.counts.land()
        return SPLITS


def op(chunk: int, kind: str) -> Op:
    return Op(1, chunk, Phase.FORWARD, kind)


def rows(value: int) -> tuple[torch.Tensor]:
    return (torch.full((2, 3), float(value)),)


class Run:
    """Chunks 0, 1, ... of which each has sent its counts and armed its dispatch."""

    def __init__(self, leaves_by_itself: bool, num_chunks: int = 2) -> None:
        self.stats = CommStats(torch.device("cpu"))
        self.wire = Wire(leaves_by_itself)
        self.comm = Comm(self.wire, None, self.stats, own_rank=0)
        self.counts: list[Counts] = []
        self.flights = []
        for chunk in range(num_chunks):
            if not leaves_by_itself:
                for counts in self.counts:
                    counts.here.set()  # whoever waits for them gets them
            started = self.comm.start_counts(op(chunk, "counts"), torch.tensor([chunk]))
            self.counts.append(started._transfer)
            self.flights.append(self.comm.start_after(op(chunk, "dispatch"), rows(chunk), Splits(started)))


def test_a_dispatch_leaves_when_its_counts_come():
    run = Run(leaves_by_itself=True)
    assert run.wire.log == ["counts 0", "counts 1"]
    thread = threading.Thread(target=run.counts[0].come)
    thread.start()
    thread.join()
    assert run.wire.log[2:] == ["armed 0"]
    (received,) = run.flights[0].land()
    assert received.equal(rows(0)[0])


def test_dispatches_leave_in_order_though_counts_come_out_of_order():
    run = Run(leaves_by_itself=True, num_chunks=3)
    run.counts[2].come()
    run.counts[1].come()
    assert run.wire.log[3:] == []
    run.counts[0].come()
    assert run.wire.log[3:] == ["armed 0", "armed 1", "armed 2"]


def test_counts_that_are_there_already_do_not_delay():
    run = Run(leaves_by_itself=True, num_chunks=1)
    run.counts[0].come()
    counts = run.comm.start_counts(op(1, "counts"), torch.tensor([1]))
    counts._transfer.here.set()
    run.comm.start_after(op(1, "dispatch"), rows(1), Splits(counts))
    assert run.wire.log == ["counts 0", "armed 0", "counts 1", "armed 1"]


def test_other_collectives_need_not_wait_where_armed_ones_have_connections_of_their_own():
    run = Run(leaves_by_itself=True)
    run.comm.start(op(0, "combine"), rows(7), SPLITS)
    assert run.wire.log == ["counts 0", "counts 1", "plain 7"]


def test_waiting_for_a_dispatch_that_has_not_left_counts_as_waiting_for_counts():
    run = Run(leaves_by_itself=True, num_chunks=1)
    timer = threading.Timer(0.05, run.counts[0].come)
    timer.start()
    run.flights[0].land()
    times = run.stats.take()
    assert times.counts_exposed_ms >= 40
    assert times.num_all_to_alls == 1
    assert times.payload_bytes == 0  # the only rank keeps its rows


def test_on_one_stream_the_order_is_that_of_issue():
    """The host waits as late as that allows: chunk 1 has been given to the device before it waits for chunk 0."""
    run = Run(leaves_by_itself=False)
    assert run.wire.log == ["counts 0", "host waits", "armed 0", "counts 1"]
    run.counts[1].come()
    run.comm.start(op(0, "combine"), rows(7), SPLITS)
    assert run.wire.log[4:] == ["host waits", "armed 1", "plain 7"]


def test_waiting_on_one_stream_lets_no_more_leave_than_needed():
    run = Run(leaves_by_itself=False)
    run.flights[0].land()
    assert run.wire.log == ["counts 0", "host waits", "armed 0", "counts 1"]


@pytest.mark.parametrize("error", [RuntimeError("Connection closed by peer"), AssertionError("wrong counts")])
def test_what_goes_wrong_on_another_thread_is_raised_by_the_wait(error):
    run = Run(leaves_by_itself=True)
    run.counts[0].error = error
    thread = threading.Thread(target=run.counts[0].come)
    thread.start()
    thread.join()
    with pytest.raises(type(error), match=str(error)):
        run.flights[0].land()
    assert run.comm.position == "waiting for L1.c0.F.counts (layer 1, chunk 0, forward, counts)"


def test_rows_of_a_single_rank_stay_where_they_are():
    comm = Comm(NoTransport(), None, CommStats(torch.device("cpu")), own_rank=0)
    counts = comm.start_counts(op(0, "counts"), torch.tensor([2]))
    sent_counts, received_counts = counts.land()
    assert sent_counts.equal(torch.tensor([[2]]))
    assert received_counts.equal(sent_counts)
    tokens, probs = torch.randn(2, 3, requires_grad=True), torch.ones(2, requires_grad=True)
    for splits in (Splits(counts), SPLITS):
        exchange = AllToAll(comm, op(0, "dispatch"), splits)
        got_tokens, got_probs = exchange.wait(exchange.issue(2 * tokens, probs))
        assert got_tokens.equal(2 * tokens)
        (got_tokens.sum() + (5 * got_probs).sum()).backward()
    assert tokens.grad.eq(4).all()
    assert probs.grad.eq(10).all()
    assert comm.stats.take().num_all_to_alls == 0
