"""The mocked world on one device: messages are on their streams, and compute waits for the rows."""

import pytest
import torch
import torch.distributed as dist

from megatron_lancet.runtime.all_to_all import AllToAll
from megatron_lancet.runtime.comm import Comm
from megatron_lancet.runtime.comm_stats import CommStats
from megatron_lancet.runtime.exchange import RowSplits
from megatron_lancet.runtime.transport.nccl import StreamTransport
from megatron_lancet.schedule.ops import Op, Phase
from megatron_lancet.testkit.mock.link import Link
from megatron_lancet.testkit.mock.mock_world import MockedNodes, mock_world
from megatron_lancet.testkit.virtual_gpu.log import CollectiveBegins, StreamWaits
from tests.gpu.devices import ON_BOTH, ON_DEVICE_ONLY, on_both_with_late

NUM_RANKS = 8
SLOW = Link(latency_us=20_000)


@pytest.fixture
def world(device):
    with mock_world(NUM_RANKS, SLOW), device.mocked_link():
        dist.all_reduce(torch.ones(1, device="cuda"))  # makes the group's stream
        if device.is_virtual:
            dist.group.WORLD._stream.name = "link"
        yield dist.group.WORLD


@on_both_with_late("link", "compute")
def test_mocked_rows_are_there_after_the_wait(device, world):
    with device.watch():
        sent, received = torch.ones(8, device="cuda"), torch.zeros(8, device="cuda")
        work = dist.all_to_all_single(received, sent, group=world, async_op=True)
        del sent  # without harm: it was recorded on the link's stream
        other = torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")  # the compute stream goes on
        assert work.wait()
        late = received + other[0, :8] - 64
    assert late.eq(1).all()
    assert work.is_completed()
    assert work.is_success()
    assert work.result()[0].eq(1).all()


@on_both_with_late("compute")
def test_mocked_rows_of_a_synchronous_message_need_no_wait(device, world):
    with device.watch():
        sent, received = torch.ones(8, device="cuda"), torch.zeros(8, device="cuda")
        dist.all_to_all_single(received, sent, group=world)
        late = received + 1
    assert late.eq(2).all()
    if device.is_virtual:
        assert not [entry for entry in device.gpu.log if isinstance(entry, StreamWaits | CollectiveBegins)]


@on_both_with_late("comm", "compute")
def test_stream_transport_over_a_mocked_link(device, world):
    stats = CommStats(torch.device("cuda"))
    comm = Comm(StreamTransport(world, world, stats), None, stats, own_rank=0)
    if device.is_virtual:
        comm.transport._stream.name = "comm"
    rows = (8,) * NUM_RANKS
    exchange = AllToAll(comm, Op(1, 0, Phase.FORWARD, "dispatch"), RowSplits(sent=rows, received=rows))
    with device.watch():
        x = torch.randn(64, 32, device="cuda", requires_grad=True)
        (y,) = exchange.wait(exchange.launch(2 * x))
        y.backward(torch.full_like(y, 3.0))
        is_right = torch.stack((y.eq(2 * x).all(), x.grad.eq(6).all()))
    assert is_right.all()
    times = stats.take()
    assert times.num_all_to_alls == 2
    assert times.payload_bytes == 2 * 64 * 32 * 4 * 7 / 8
    if not device.is_virtual:
        assert times.all_to_all_ms >= 40  # two latencies


@ON_BOTH
def test_mocked_reductions_on_the_device(device, world):
    x = torch.ones(4, device="cuda")
    with device.watch():
        dist.all_reduce(x, group=world)
    assert x.eq(NUM_RANKS).all()


@ON_DEVICE_ONLY
def test_mocked_rows_take_the_time_of_the_link(world):
    received, sent = torch.zeros(8, device="cuda"), torch.ones(8, device="cuda")
    work = dist.all_to_all_single(received, sent, group=world, async_op=True)
    assert not work.is_completed()
    early = received.clone()  # the compute stream goes on
    assert work.wait()
    late = received.clone()
    assert early.eq(0).all()
    assert late.eq(1).all()
    assert work.get_future().wait()[0].equal(sent)


@ON_BOTH
def test_groups_share_a_link_on_the_device(device, world):
    """Also a synchronous message and an asynchronous one."""
    other = dist.new_group(range(NUM_RANKS))
    x = torch.ones(8, device="cuda")
    with device.watch():
        work = dist.all_to_all_single(torch.empty_like(x), x, group=other, async_op=True)
        with torch.cuda.stream(other._stream):
            _, end_ns = other._link.last_times_ns()
        dist.all_to_all_single(torch.empty_like(x), x, group=world)
        start_ns, _ = world._link.last_times_ns()
        work.wait()
    assert start_ns >= end_ns - 1_000


@ON_BOTH
def test_groups_inside_a_node_have_a_link_of_their_own(device):
    fast = Link(latency_us=1)
    with mock_world(NUM_RANKS, SLOW, nodes=MockedNodes(4, fast)), device.mocked_link():
        inside, across = dist.new_group([0, 1]), dist.new_group([0, 4])
        assert inside._link is not across._link
        assert across._link is dist.group.WORLD._link
        assert (inside._link.link, across._link.link) == (fast, SLOW)
        assert dist.new_group([0, 2])._link is inside._link
        dist.all_reduce(torch.ones(1, device="cuda"), group=inside)
