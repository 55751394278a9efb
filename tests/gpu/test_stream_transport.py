"""The NCCL transport on one device: a group of one rank sends to itself, but streams, events and figures are real."""

import pytest
import torch
import torch.distributed as dist

from megatron_lancet.runtime.all_to_all import AllToAll
from megatron_lancet.runtime.comm import Comm, RowSplits
from megatron_lancet.runtime.comm_stats import CommStats
from megatron_lancet.runtime.transport.base import ReadyEvent
from megatron_lancet.runtime.transport.nccl import StreamTransport
from megatron_lancet.schedule.ops import Op, Phase

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and sees one only in make test-gpu"),
]


@pytest.fixture
def group(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_stream_transport_lets_compute_wait_for_the_rows(group):
    stats = CommStats(torch.device("cuda"))
    comm = Comm(StreamTransport(group, group, stats), None, stats, own_rank=0)
    x = torch.randn(4096, 1024, device="cuda", requires_grad=True)
    exchange = AllToAll(comm, Op(1, 0, Phase.FORWARD, "dispatch"), RowSplits(sent=(4096,), received=(4096,)))
    ticket = exchange.launch(2 * x)
    other = torch.randn(2048, 2048, device="cuda")
    for _ in range(20):
        other = other @ other / 2048
    (y,) = exchange.wait(ticket)
    y.backward(torch.full_like(y, 3.0))
    assert y.equal(2 * x)
    assert x.grad.eq(6).all()
    times = stats.take()
    assert times.num_all_to_alls == 2
    # The all-to-all of the forward pass ends behind the products; that of the backward pass has nothing beside it.
    assert 0 < times.exposed_ms < times.all_to_all_ms


def test_stream_transport_brings_counts_to_the_host(group):
    counts = torch.arange(8, device="cuda")
    stats = CommStats(torch.device("cuda"))
    ready = ReadyEvent(counts)
    known = StreamTransport(group, group, stats).exchange_counts(lambda: counts, ready).wait()
    assert known.sent == known.received == [list(range(8))]
    assert known.received_on_device.equal(counts.view(1, 8))
