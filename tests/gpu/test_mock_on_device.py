"""The mocked world on one device: the pause is on the communication stream, and compute waits for the rows."""

import pytest
import torch
import torch.distributed as dist

from megatron_lancet.mock.link import Link
from megatron_lancet.mock.mock_world import mock_world
from megatron_lancet.runtime.all_to_all import AllToAll
from megatron_lancet.runtime.comm import Comm, RowSplits
from megatron_lancet.runtime.comm_stats import CommStats
from megatron_lancet.runtime.transport.nccl import StreamTransport
from megatron_lancet.schedule.ops import Op, Phase

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and sees one only in make test-gpu"),
]
SLOW = Link(latency_us=20_000)


@pytest.fixture
def world():
    with mock_world(8, SLOW):
        yield dist.group.WORLD


def test_mock_rows_arrive_after_the_link_time(world):
    received, sent = torch.zeros(8, device="cuda"), torch.ones(8, device="cuda")
    work = dist.all_to_all_single(received, sent, group=world, async_op=True)
    assert not work.is_completed()
    early = received.clone()  # the compute stream goes on
    assert work.wait()
    late = received.clone()
    assert early.eq(0).all()
    assert late.eq(1).all()
    assert work.get_future().wait()[0].equal(sent)


def test_stream_transport_hides_the_mock_link_time(world):
    stats = CommStats(torch.device("cuda"))
    comm = Comm(StreamTransport(world, world, stats), None, stats, own_rank=0)
    x = torch.randn(64, 32, device="cuda", requires_grad=True)
    rows = (8,) * 8
    exchange = AllToAll(comm, Op(1, 0, Phase.FORWARD, "dispatch"), RowSplits(sent=rows, received=rows))
    (y,) = exchange.wait(exchange.launch(2 * x))
    y.backward(torch.full_like(y, 3.0))
    assert y.equal(2 * x)
    assert x.grad.eq(6).all()
    times = stats.take()
    assert times.num_all_to_alls == 2
    assert times.all_to_all_ms > 20  # two pauses; half of them is asked for, since clocks of devices change


def test_mock_reductions_on_the_device(world):
    x = torch.ones(4, device="cuda")
    dist.all_reduce(x, group=world)
    assert x.eq(8).all()
