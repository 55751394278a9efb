"""When messages that wait for token counts are launched, and in which order."""

import threading
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from megatron_lancet.runtime import comm_stats
from megatron_lancet.runtime.all_to_all import AllToAll
from megatron_lancet.runtime.comm import Comm, CommSettings
from megatron_lancet.runtime.comm_stats import CommStats
from megatron_lancet.runtime.exchange import CountsExchange, RowSplits
from megatron_lancet.runtime.transport.base import ReadyEvent
from megatron_lancet.runtime.transport.hops import Hop, Hops
from megatron_lancet.runtime.transport.local import LocalTransport
from megatron_lancet.schedule.nodes import Nodes
from megatron_lancet.schedule.ops import BETWEEN_NODES, INSIDE_NODE, Op, OpKind, Phase
from tests.fakes import Loopback, LoopbackCounts, cpu_stats

SPLITS = RowSplits(sent=(2,), received=(2,))


class NamedLoopback(Loopback):
    """Its log has the value of the rows of each launch, and whether the launch waited for counts."""

    def launch_entry(self, sent, ready):
        return f"{'queued' if ready is not None else 'plain'} {int(sent[0, 0])}"


class Splits:
    def __init__(self, counts: CountsExchange, found: RowSplits | None = SPLITS) -> None:
        self.counts = counts
        self._found = found

    def splits(self) -> RowSplits | None:
        self.counts.wait()
        return self._found


def op(chunk: int, kind: str) -> Op:
    return Op(1, chunk, Phase.FORWARD, kind)


def rows(value: int) -> tuple[torch.Tensor]:
    return (torch.full((2, 3), float(value)),)


def launch_counts(comm: Comm, chunk: int, num_rows: int | None = None) -> CountsExchange:
    """Sends a chunk's counts; by default the fake's log shows its number in their place."""
    counts = torch.tensor([chunk if num_rows is None else num_rows])
    return comm.launch_counts(op(chunk, "counts"), lambda: counts, ReadyEvent(counts))


class Run:
    """Chunks 0, 1, ... of which each has sent its counts and queued its dispatch."""

    def __init__(self, launches_in_callback: bool, num_chunks: int = 2) -> None:
        self.stats = cpu_stats()
        self.transport = NamedLoopback(launches_in_callback=launches_in_callback)
        self.comm = Comm(self.transport, None, self.stats, own_rank=0)
        self.counts: list[LoopbackCounts] = []
        self.exchanges = []
        for chunk in range(num_chunks):
            if not launches_in_callback:
                for counts in self.counts:
                    counts.arrived.set()  # whoever waits for them gets them
            launched = launch_counts(self.comm, chunk)
            self.counts.append(launched.transfer)
            self.exchanges.append(self.comm.launch_when_known(op(chunk, "dispatch"), rows(chunk), Splits(launched)))


def test_dispatch_is_launched_when_its_counts_arrive():
    run = Run(launches_in_callback=True)
    assert run.transport.log == ["counts 0", "counts 1"]
    thread = threading.Thread(target=run.counts[0].arrive)
    thread.start()
    thread.join()
    assert run.transport.log[2:] == ["queued 0"]
    (received,) = run.exchanges[0].wait()
    assert received.equal(rows(0)[0])


def test_dispatches_are_launched_in_order_whenever_counts_come():
    run = Run(launches_in_callback=True, num_chunks=3)
    run.counts[2].arrive()
    run.counts[1].arrive()
    assert run.transport.log[3:] == []
    run.counts[0].arrive()
    assert run.transport.log[3:] == ["queued 0", "queued 1", "queued 2"]


def test_counts_that_have_arrived_do_not_delay_a_dispatch():
    run = Run(launches_in_callback=True, num_chunks=1)
    run.counts[0].arrive()
    counts = launch_counts(run.comm, 1)
    counts.transfer.arrived.set()
    run.comm.launch_when_known(op(1, "dispatch"), rows(1), Splits(counts))
    assert run.transport.log == ["counts 0", "queued 0", "counts 1", "queued 1"]


def test_combine_does_not_wait_for_dispatches_on_own_connections():
    run = Run(launches_in_callback=True)
    run.comm.launch(op(0, "combine"), rows(7), SPLITS)
    assert run.transport.log == ["counts 0", "counts 1", "plain 7"]


@pytest.mark.parametrize("launches_in_callback", [True, False])
def test_message_of_rows_in_rounds_is_left_out(launches_in_callback):
    run = Run(launches_in_callback, num_chunks=0)
    queued = []
    for chunk, found in ((0, SPLITS), (1, None), (2, SPLITS)):
        counts = launch_counts(run.comm, chunk)
        queued.append(run.comm.launch_when_known(op(chunk, "dispatch"), rows(chunk), Splits(counts, found)))
        counts.transfer.arrive()
    assert [exchange.is_left_out() for exchange in queued] == [False, True, False]
    assert [entry for entry in run.transport.log if "queued" in entry] == ["queued 0", "queued 2"]
    (received,) = queued[2].wait()
    assert received.equal(rows(2)[0])


def test_wait_for_a_queued_dispatch_is_exposed_time_of_counts(monkeypatch):
    run = Run(launches_in_callback=True, num_chunks=1)
    now_s = 100.0
    monkeypatch.setattr(comm_stats.time, "perf_counter", lambda: now_s)

    def arrive_later() -> bool:
        nonlocal now_s
        now_s += 0.05
        run.counts[0].arrive()
        return True

    monkeypatch.setattr(run.exchanges[0].launched, "wait", arrive_later)
    run.exchanges[0].wait()
    assert run.transport.log == ["counts 0", "queued 0", "wait"]
    times = run.stats.take()
    assert times.counts_exposed_ms == pytest.approx(50)
    assert times.num_all_to_alls == 1
    assert times.payload_bytes == 0  # the only rank keeps its rows


@pytest.mark.parametrize(
    ("kind", "sent", "num_leaving"),
    [
        ("dispatch", (1, 2, 4, 8), 3),  # from the third of four ranks, two on each node
        ("combine", (1, 2, 4, 8), 3),
        ("node_dispatch", (5, 7), 5),  # to both nodes, the second of which is its own
        ("node_combine", (5, 7), 5),
        ("local_dispatch", (6, 9), 0),
        ("local_combine", (6, 9), 0),
    ],
)
def test_rows_that_leave_the_node_are_counted_apart(kind, sent, num_leaving):
    """Their bytes in every direction, and their number in forward dispatches that begin a token's way."""
    stats, transport = cpu_stats(), Loopback()
    places = {"node_dispatch": 1, "node_combine": 1, "local_dispatch": 0, "local_combine": 0}
    hops = Hops(Nodes(2, 2), {name: Hop(transport, place) for name, place in places.items()})
    for phase in (Phase.FORWARD, Phase.INPUT_GRAD):
        given = {"layout": Nodes(2, 2)} if kind in ("dispatch", "combine") else {"hops": hops}
        comm = Comm(transport, None, stats, own_rank=2, **given)
        comm.launch(Op(1, 0, phase, OpKind(kind)), (torch.zeros(sum(sent), 2),), RowSplits(sent, sent)).wait()
        times = stats.take()
        assert times.between_nodes_bytes == num_leaving * 8
        begins = phase is Phase.FORWARD and kind in ("dispatch", "node_dispatch")
        assert times.between_nodes_rows == (num_leaving if begins else 0)
        assert times.payload_bytes == 8 * (sum(sent) - sent[places.get(kind, 2)])


def test_one_stream_keeps_the_order_of_launch():
    """The host waits as late as that allows: chunk 1 has been given to the device before it waits for chunk 0."""
    run = Run(launches_in_callback=False)
    assert run.transport.log == ["counts 0", "host waits", "queued 0", "counts 1"]
    run.counts[1].arrive()
    run.comm.launch(op(0, "combine"), rows(7), SPLITS)
    assert run.transport.log[4:] == ["host waits", "queued 1", "plain 7"]


def test_wait_on_one_stream_launches_no_more_than_needed():
    run = Run(launches_in_callback=False)
    run.exchanges[0].wait()
    assert run.transport.log == ["counts 0", "host waits", "queued 0", "counts 1", "wait"]


class Clocks:
    """A host, and a device with kernels to run until ``busy_until_ms``."""

    def __init__(self, busy_until_ms: float) -> None:
        self.host_ms, self.busy_until_ms = 0.0, busy_until_ms
        self.num_events = 0


class TimedEvent:
    """An event that the device reaches when it has run its kernels, or at once."""

    def __init__(self, clocks: Clocks) -> None:
        self.clocks, self.at_ms = clocks, 0.0

    def record(self) -> None:
        self.clocks.num_events += 1
        self.at_ms = max(self.clocks.host_ms, self.clocks.busy_until_ms)

    def elapsed_time(self, end: "TimedEvent") -> float:
        return end.at_ms - self.at_ms


@pytest.mark.parametrize(("busy_until_ms", "exposed_ms"), [(0.0, 5.0), (3.0, 2.0), (9.0, 0.0)])
def test_counts_are_exposed_on_cuda_while_the_device_is_idle(monkeypatch, busy_until_ms, exposed_ms):
    """The host waits for 5 ms in each case."""
    clocks = Clocks(busy_until_ms)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: TimedEvent(clocks))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    run = Run(launches_in_callback=False, num_chunks=1)
    run.comm.stats = CommStats(torch.device("cuda"))

    def arrive_ms() -> bool:
        clocks.host_ms += 5.0
        return True

    monkeypatch.setattr(run.counts[0].arrived, "wait", arrive_ms)
    run.comm.launch(op(0, "combine"), rows(7), SPLITS)
    assert run.transport.log == ["counts 0", "host waits", "queued 0", "plain 7"]
    assert clocks.num_events == 2
    assert run.comm.stats.take().counts_exposed_ms == exposed_ms


def test_counts_that_have_arrived_record_no_event(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: pytest.fail("an event is recorded"))
    run = Run(launches_in_callback=False, num_chunks=1)
    run.comm.stats = CommStats(torch.device("cuda"))
    run.counts[0].arrived.set()
    run.comm.launch(op(0, "combine"), rows(7), SPLITS)
    assert run.comm.stats.take().counts_exposed_ms == 0.0


@pytest.mark.parametrize("error", [RuntimeError("Connection closed by peer"), AssertionError("wrong counts")])
def test_error_on_another_thread_is_raised_by_the_wait(error):
    run = Run(launches_in_callback=True)
    run.counts[0].error = error
    thread = threading.Thread(target=run.counts[0].arrive)
    thread.start()
    thread.join()
    with pytest.raises(type(error), match=str(error)):
        run.exchanges[0].wait()
    assert run.comm.position == "waiting for L1.c0.F.counts (layer 1, chunk 0, forward, counts)"


def test_local_transport_sends_no_rows():
    comm = Comm(LocalTransport(), None, cpu_stats(), own_rank=0)
    counts = launch_counts(comm, 0, num_rows=2)
    known = counts.wait()
    assert known.sent == known.received == [[2]]
    assert known.received_on_device.tolist() == [[2]]
    tokens, probs = torch.randn(2, 3, requires_grad=True), torch.ones(2, requires_grad=True)
    for splits in (Splits(counts), SPLITS):
        exchange = AllToAll(comm, op(0, "dispatch"), splits)
        got_tokens, got_probs = exchange.wait(exchange.launch(2 * tokens, probs))
        assert got_tokens.equal(2 * tokens)
        (got_tokens.sum() + (5 * got_probs).sum()).backward()
    assert tokens.grad.eq(4).all()
    assert probs.grad.eq(10).all()
    assert comm.stats.take().num_all_to_alls == 0


class HopsRun:
    """Chunks of which each has sent its counts and queued its rows for nodes; all connections write one log."""

    def __init__(self, launches_in_callback: bool, keeps_one_order: bool, num_chunks: int = 2) -> None:
        whole, between, inside = (NamedLoopback(launches_in_callback=launches_in_callback) for _ in range(3))
        self.log = between.log = inside.log = whole.log
        by_kind = dict.fromkeys(BETWEEN_NODES, Hop(between, 0)) | dict.fromkeys(INSIDE_NODE, Hop(inside, 0))
        self.comm = Comm(whole, None, cpu_stats(), own_rank=0, hops=Hops(Nodes(2, 2), by_kind))
        self.comm.use(CommSettings(keeps_one_order=keeps_one_order))
        self.counts: list[LoopbackCounts] = []
        self.exchanges = []
        for chunk in range(num_chunks):
            launched = launch_counts(self.comm, chunk)
            self.counts.append(launched.transfer)
            self.exchanges.append(
                self.comm.launch_when_known(op(chunk, "node_dispatch"), rows(chunk), Splits(launched))
            )


@pytest.mark.parametrize("keeps_one_order", [False, True])
def test_message_inside_node_does_not_wait_for_one_between_nodes(keeps_one_order):
    """Other chunks' rows for nodes wait for their counts, on connections of their own."""
    run = HopsRun(launches_in_callback=True, keeps_one_order=keeps_one_order)
    for kind in sorted(INSIDE_NODE):
        run.comm.launch(op(0, kind), rows(7), SPLITS)
    assert run.log == ["counts 0", "counts 1", "plain 7", "plain 7"]


def test_messages_between_nodes_keep_one_order(monkeypatch):
    """A combine between nodes waits until the dispatches before it have been launched, though no rank needs these."""
    run = HopsRun(launches_in_callback=True, keeps_one_order=True)
    waits_or_ended = threading.Event()
    last = run.exchanges[-1].launched
    wait = last.wait

    def notice_and_wait() -> bool:
        waits_or_ended.set()
        return wait()

    def launch() -> None:
        run.comm.launch(op(0, "node_combine"), rows(7), SPLITS)
        waits_or_ended.set()

    monkeypatch.setattr(last, "wait", notice_and_wait)
    thread = threading.Thread(target=launch)
    thread.start()
    waits_or_ended.wait()
    run.counts[1].arrive()
    assert run.log == ["counts 0", "counts 1"]
    run.counts[0].arrive()
    thread.join()
    assert run.log == ["counts 0", "counts 1", "plain 0", "plain 1", "plain 7"]


def test_streams_of_both_hops_are_launched_in_one_order():
    """Of kernels that wait for other ranks, several may be on a device: all ranks enqueue those of both hops alike."""
    run = HopsRun(launches_in_callback=False, keeps_one_order=False, num_chunks=1)
    run.counts[0].arrived.set()
    run.comm.launch(op(0, "local_dispatch"), rows(7), SPLITS)
    assert run.log == ["counts 0", "host waits", "queued 0", "plain 7"]


def test_rows_that_stay_in_a_hop_are_not_counted_as_sent():
    """Of three ranks of the group this is the second; of its two on the node the first."""
    between = NamedLoopback()
    comm = Comm(Loopback(), None, cpu_stats(), own_rank=1, hops=Hops(Nodes(2, 2), {"node_combine": Hop(between, 0)}))
    splits = RowSplits(sent=(1, 4), received=(1, 4))
    comm.launch(op(0, "node_combine"), (torch.zeros(5, 3),), splits).wait()
    assert comm.stats.take().payload_bytes == 4 * 3 * 4


@pytest.mark.parametrize("on_cuda", [False, True])
def test_fault_of_a_ranks_own_device_blames_no_other(on_cuda):
    """On CUDA a wait for counts raises what the rank's own kernels did; NCCL ends the process if a peer is lost."""
    fault = RuntimeError("CUDA error: device-side assert triggered")
    stats = cpu_stats()
    comm = Comm(NamedLoopback(), None, stats, own_rank=0)
    stats.on_cuda = on_cuda
    transfer = SimpleNamespace(wait=Mock(side_effect=fault))
    counts = SimpleNamespace(op=op(7, "counts"), transfer=transfer, launched_s=0.0, micro_batch=None)
    with pytest.raises(RuntimeError, match="device-side assert") as found:
        comm.wait_for_counts(counts)
    assert (found.value is fault) == on_cuda
    assert "".join(getattr(fault, "__notes__", [])).startswith("seen in the wait for L1.c7.F.counts") == on_cuda
