"""The NCCL transport on one device: a group of one rank sends to itself, but streams, events and figures are real."""

import pytest
import torch

from megatron_lancet.runtime.all_to_all import AllToAll
from megatron_lancet.runtime.comm import Comm
from megatron_lancet.runtime.comm_stats import CommStats
from megatron_lancet.runtime.exchange import CountsExchange, RowSplits
from megatron_lancet.runtime.transport.base import ReadyEvent
from megatron_lancet.runtime.transport.nccl import StreamTransport
from megatron_lancet.schedule.ops import Op, Phase
from tests.gpu.devices import ON_DEVICE_ONLY, on_both_with_late

NUM_ROWS, ROW_SIZE = 4096, 64
DISPATCH, COUNTS = Op(1, 0, Phase.FORWARD, "dispatch"), Op(1, 0, Phase.FORWARD, "counts")


@pytest.fixture
def comm(device, tmp_path):
    with device.group_of_one(tmp_path) as group:
        stats = CommStats(torch.device("cuda"))
        transport = StreamTransport(group, group, stats)
        if device.is_virtual:
            transport._stream.name, transport._counts_stream.name = "rows", "counts"
        yield Comm(transport, None, stats, own_rank=0)


class Pending:
    """Splits that are known once the counts have arrived: all rows come from this rank."""

    def __init__(self, counts: CountsExchange) -> None:
        self.counts = counts

    def splits(self) -> RowSplits:
        counts = self.counts.wait()
        return RowSplits(sent=(sum(counts.sent[0]),), received=(sum(counts.received[0]),))


@on_both_with_late("rows", "compute")
def test_stream_transport_lets_compute_wait_for_the_rows(device, comm):
    with device.watch():
        x = torch.randn(NUM_ROWS, ROW_SIZE, device="cuda", requires_grad=True)
        exchange = AllToAll(comm, DISPATCH, RowSplits(sent=(NUM_ROWS,), received=(NUM_ROWS,)))
        ticket = exchange.launch(2 * x)
        (y,) = exchange.wait(ticket)
        y.backward(torch.full_like(y, 3.0))
        is_right = torch.stack((y.eq(2 * x).all(), x.grad.eq(6).all()))
    assert is_right.all()
    assert comm.stats.take().num_all_to_alls == 2


@on_both_with_late("counts", "compute")
def test_stream_transport_brings_counts_to_the_host(device, comm):
    with device.watch():
        counts = torch.arange(8, device="cuda")
        found = comm.transport.exchange_counts(lambda: 2 * counts, ReadyEvent(counts)).wait()
        on_device = found.received_on_device + 0
    assert found.sent == found.received == [[0, 2, 4, 6, 8, 10, 12, 14]]
    assert on_device.tolist() == found.received


@on_both_with_late("rows", "compute")
def test_dispatch_after_its_counts_leaves_before_the_next(device, comm):
    """Its rows were ready before other kernels were enqueued, and it is received in memory of its own stream."""
    with device.watch():
        x = torch.randn(NUM_ROWS, ROW_SIZE, device="cuda", requires_grad=True)
        counts = torch.full((4,), NUM_ROWS // 4, device="cuda")
        exchange = AllToAll(comm, DISPATCH, Pending(comm.launch_counts(COUNTS, lambda: +counts, ReadyEvent(counts))))
        ticket = exchange.launch(2 * x)
        other = torch.randn(256, 256, device="cuda")
        other = other @ other
        next_one = AllToAll(comm, Op(1, 1, Phase.FORWARD, "dispatch"), RowSplits(sent=(256,), received=(256,)))
        next_ticket = next_one.launch(other)
        assert "launched" in comm.position
        assert not comm._pending
        (y,) = exchange.wait(ticket)
        (z,) = next_one.wait(next_ticket)
        y.backward(torch.full_like(y, 3.0))
        is_right = torch.stack((y.eq(2 * x).all(), z.eq(other).all(), x.grad.eq(6).all()))
    assert is_right.all()
    assert comm.stats.take().num_all_to_alls == 3


@on_both_with_late("compute", "rows")
def test_memory_of_received_rows_is_kept_for_their_reader(device, comm):
    """Rows of one message are dropped behind a reader that has not run, and the next message takes the memory.

    Whatever a message waits for is in front of all readers, so only the memory can order it behind one.
    """
    sums, chunks = [], range(4)
    with device.watch():
        counts = torch.full((1,), NUM_ROWS, device="cuda")
        sent = [torch.full((NUM_ROWS, ROW_SIZE), float(chunk), device="cuda") for chunk in chunks]
        ops = [(Op(1, chunk, Phase.FORWARD, "counts"), Op(1, chunk, Phase.FORWARD, "dispatch")) for chunk in chunks]
        # A count would launch the messages that are queued before it.
        known = [Pending(comm.launch_counts(op, lambda: +counts, ReadyEvent(counts))) for op, _ in ops]
        queued = [
            comm.launch_when_known(op, (rows,), pending)
            for (_, op), rows, pending in zip(ops, sent, known, strict=True)
        ]
        while queued:
            (rows,) = queued.pop(0).wait()
            device.keep_busy()
            sums.append(rows.sum())
            del rows
    assert torch.stack(sums).tolist() == [chunk * NUM_ROWS * ROW_SIZE for chunk in chunks]


@ON_DEVICE_ONLY
def test_time_of_messages_and_exposed_time_are_measured(comm):
    x = torch.randn(NUM_ROWS, 1024, device="cuda", requires_grad=True)
    exchange = AllToAll(comm, DISPATCH, RowSplits(sent=(NUM_ROWS,), received=(NUM_ROWS,)))
    ticket = exchange.launch(2 * x)
    other = torch.randn(2048, 2048, device="cuda")
    for _ in range(20):
        other = other @ other / 2048
    (y,) = exchange.wait(ticket)
    y.backward(torch.full_like(y, 3.0))
    times = comm.stats.take()
    # The all-to-all of the forward pass ends behind the products; that of the backward pass has nothing next to it.
    assert 0 < times.exposed_ms < times.all_to_all_ms
