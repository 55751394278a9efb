"""Collectives of a mocked world: what they give, when, and what they refuse."""

import threading
from contextlib import closing
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron_lancet.errors import UsageError
from megatron_lancet.runtime.all_to_all import AllToAll
from megatron_lancet.runtime.comm import Comm
from megatron_lancet.runtime.exchange import RowSplits
from megatron_lancet.runtime.transport.base import ReadyEvent
from megatron_lancet.runtime.transport.group import GroupTransport
from megatron_lancet.runtime.transport.select import make_transport
from megatron_lancet.schedule.ops import Op, Phase
from megatron_lancet.testkit.mock import mock_group
from megatron_lancet.testkit.mock.link import Link
from megatron_lancet.testkit.mock.mock_work import Clock
from megatron_lancet.testkit.mock.mock_world import MockedNodes, mock_world
from megatron_lancet.testkit.mock.paced_link import PacedLink
from megatron_lancet.training.megatron.mock_patches import counts_of_all_ranks
from tests.fakes import cpu_stats

NEVER = Link(latency_us=1e12)
"""Longer than any test."""
ONE_BYTE_PER_HOUR = Link(gbytes_per_s=1e-9 / 3600)
SOON = Link(latency_us=500)


@pytest.fixture
def four_ranks():
    with mock_world(4):
        yield


def test_mock_world_is_initialized_and_destroyed():
    new_group = dist.new_group
    with mock_world(8):
        assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 8, "mock")
        dist.all_reduce(torch.ones(1))
    assert not dist.is_initialized()
    assert dist.new_group is new_group
    with pytest.raises(ValueError, match="loopback"), mock_world(2, SOON):
        dist.all_to_all_single(torch.empty(2), torch.empty(4))
    assert not dist.is_initialized()
    assert "mocked link" not in {thread.name for thread in threading.enumerate()}


def test_mocked_messages_with_one_connection_are_refused(four_ranks, monkeypatch):
    monkeypatch.setattr(mock_group, "on_cuda", lambda tensor: True)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with pytest.raises(UsageError, match=r"CUDA_DEVICE_MAX_CONNECTIONS is 1: .* Set it to 32, or unset it\."):
        dist.all_reduce(torch.ones(2))
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: pytest.fail("the message has a stream"))
    with pytest.raises(pytest.fail.Exception, match="has a stream"):
        dist.all_reduce(torch.ones(2))


def test_mock_groups_have_their_own_size(four_ranks):
    group = dist.new_group([0, 2], backend="gloo", group_desc="as Megatron asks")
    assert (dist.get_backend(group), group.size(), group.rank()) == ("mock", 2, 0)
    x = torch.ones(3)
    dist.all_reduce(x, group=group)
    assert x.tolist() == [2, 2, 2]
    assert dist.new_group([1, 3]) is dist.GroupMember.NON_GROUP_MEMBER


def test_mock_collectives_use_the_slice_of_the_own_rank():
    # Not from new_group: torch 2.11 sorts the ranks of a group, and the own one is rank 0 then.
    with closing(Clock()) as clock:
        group = mock_group.MockProcessGroup("two", 1, 2, PacedLink(Link()), timedelta(minutes=1), clock)
        out = torch.empty(2)
        group.reduce_scatter_single(out, torch.arange(4.0)).wait()
        assert out.tolist() == [4, 6]
        average = dist.ReduceScatterOptions()
        average.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG)
        group.reduce_scatter_single(out, torch.arange(4.0), average).wait()
        assert out.tolist() == [2, 3]


def test_mock_all_to_all_returns_the_sent_rows(four_ranks):
    sent = torch.arange(12.0).view(6, 2)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, [1, 0, 3, 2], [1, 0, 3, 2])
    assert received.equal(sent)
    outputs = [torch.empty(n) for n in (1, 0, 3, 2)]
    dist.all_to_all(outputs, list(sent[:, 0].split([1, 0, 3, 2])))
    assert torch.cat(outputs).equal(sent[:, 0])


def test_mock_all_to_all_refuses_unequal_splits(four_ranks):
    with pytest.raises(ValueError, match=r"receive splits must equal send splits.*\[2, 2, 1, 1\].*\[1, 1, 2, 2\]"):
        dist.all_to_all_single(torch.empty(6), torch.empty(6), [2, 2, 1, 1], [1, 1, 2, 2])
    with pytest.raises(ValueError, match="loopback"):
        dist.all_to_all([torch.empty(2)] * 4, [torch.empty(n) for n in (1, 3, 2, 2)])


def test_mock_coalesced_collectives_complete(four_ranks):
    a, b = torch.ones(2), torch.full((3,), 2.0)
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as work:
        dist.all_reduce(a)
        dist.all_reduce(b)
    work.wait()
    assert (a.tolist(), b.tolist()) == ([4, 4], [8, 8, 8])
    gathered, part = torch.empty(8), torch.empty(1)
    with dist.distributed_c10d._coalescing_manager():
        dist.all_gather_into_tensor(gathered, a)
    with dist.distributed_c10d._coalescing_manager():
        dist.reduce_scatter_tensor(part, torch.arange(4.0) + 1)
    assert gathered.tolist() == [4] * 8
    assert part.tolist() == [4]


@pytest.mark.parametrize(
    ("call", "op"),
    [
        (lambda x: dist.send(x, 1), "send"),
        (lambda x: dist.recv(x, 1), "recv"),
        (lambda x: dist.recv(x), "recv_anysource"),
        (lambda x: dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 1)]), "send"),
        (lambda x: dist.all_reduce(x, op=dist.ReduceOp.PRODUCT), "all_reduce knows SUM, AVG, MAX and MIN"),
        (lambda x: dist.group.WORLD.split_group([0, 1]), "split_group"),
        (lambda x: dist.group.WORLD.monitored_barrier(), "monitored_barrier"),
    ],
)
def test_mock_group_names_an_unsupported_collective(four_ranks, call, op):
    with pytest.raises(NotImplementedError, match=op):
        call(torch.ones(2))


def test_mock_scatter_refuses_another_root(four_ranks):
    with pytest.raises(ValueError, match="can't scatter from rank 1"):
        dist.scatter(torch.empty(1), None, src=1)
    own = torch.empty(1)
    dist.scatter(own, list(torch.arange(4.0).split(1)), src=0)
    assert own.item() == 0


def test_mock_message_is_not_received_before_its_arrival():
    with mock_world(4, NEVER):
        received = torch.zeros(4)
        work = dist.all_to_all_single(received, torch.ones(4), async_op=True)
        future = work.get_future()
        assert not work.is_completed()
        assert not future.done()
        assert received.eq(0).all()


def test_mock_message_is_copied_at_its_arrival():
    """So a sender that uses its buffer again too early is found out."""
    with mock_world(4, SOON):
        received, sent = torch.zeros(4), torch.ones(4)
        work = dist.all_to_all_single(received, sent, async_op=True)
        sent.fill_(2)
        work.wait()
        assert work.is_completed()
        assert received.eq(2).all()


def test_mock_future_completes_without_a_wait():
    with mock_world(4, SOON):
        received = torch.zeros(4)
        seen = []
        work = dist.all_to_all_single(received, torch.ones(4), async_op=True)
        future = work.get_future()
        future.add_done_callback(lambda done: seen.append(done.value()[0].tolist()))
        future.wait()
        assert work.get_future() is future
        assert work.is_completed()
        work.wait()
        assert received.eq(1).all()
    assert seen == [[1, 1, 1, 1]]


def test_mock_wait_times_out():
    with mock_world(4, NEVER, timeout=timedelta(milliseconds=20)):
        with pytest.raises(RuntimeError, match=r"mocked all_reduce timed out after 0.02 s.*faster link"):
            dist.all_reduce(torch.ones(1))
        work = dist.all_reduce(torch.ones(1), async_op=True)
        with pytest.raises(RuntimeError, match=r"timed out after 0.001 s"):
            work.wait(timedelta(milliseconds=1))


def test_mock_link_counts_only_bytes_to_other_ranks():
    with mock_world(2, ONE_BYTE_PER_HOUR):
        alone = dist.new_group([0])
        dist.all_reduce(torch.ones(100), group=alone)
        x = torch.ones(3)
        dist.all_to_all_single(torch.empty(3), x, [3, 0], [3, 0])  # all rows stay here
        dist.barrier()
        assert not dist.all_to_all_single(torch.empty(3), x, [2, 1], [2, 1], async_op=True).is_completed()


def test_mock_groups_can_have_their_own_links():
    with mock_world(2, NEVER):
        fast = dist.new_group([0, 1], pg_options=Link())
        x = torch.ones(1)
        dist.all_reduce(x, group=fast)
        assert x.item() == 2


def test_equal_links_are_one_link_on_a_device():
    other = Link(latency_us=7)
    with mock_world(4, SOON, nodes=MockedNodes(2, SOON), num_sms=3):
        world, inside, across = dist.group.WORLD, dist.new_group([0, 1]), dist.new_group([0, 2])
        first, second = (dist.new_group([0, 1], pg_options=link) for link in (other, Link(latency_us=7)))
        assert world._link is across._link
        assert inside._link is not across._link, "equal, but another wire"
        assert first._link is second._link
        assert {group._link.num_sms for group in (world, inside, first)} == {3}


def test_mock_all_to_all_is_invisible_to_autograd():
    """c10d's collectives write past autograd; so does the mock's late delivery, from a thread or not."""
    with mock_world(2, SOON):
        sent = torch.ones(2, requires_grad=True)
        received = torch.empty(2)
        version = received._version
        dist.all_to_all_single(received, sent, async_op=True).get_future().wait()
        assert not received.requires_grad
        assert received._version == version


@pytest.mark.parametrize("link", [Link(), SOON], ids=str)
def test_all_to_all_returns_rows_and_gradients_in_a_mock_world(link):
    with mock_world(4, link):
        stats = cpu_stats()
        transport = make_transport(dist.group.WORLD, dist.group.WORLD, torch.device("cpu"), stats, timedelta(minutes=1))
        assert isinstance(transport, GroupTransport)
        counts = torch.tensor([1, 0, 3, 2])
        known = transport.exchange_counts(lambda: counts, ReadyEvent(counts)).wait()
        assert known.sent == known.received
        rows = tuple(map(sum, known.received))
        comm = Comm(transport, None, stats, own_rank=0)
        a = AllToAll(comm, Op(1, 0, Phase.FORWARD, "dispatch"), RowSplits(sent=rows, received=rows))
        x = torch.randn(6, 2, requires_grad=True)
        (y,) = a.wait(a.launch(x))
        y.backward(torch.full_like(y, 3.0))
        assert y.equal(x)
        assert x.grad.eq(3).all()
        assert stats.take().num_all_to_alls == 2


@pytest.mark.parametrize("rank", [0, 2])
def test_loopback_counts_of_all_ranks_are_symmetric(rank):
    own = torch.randint(9, (8,), generator=torch.Generator().manual_seed(0))
    table = counts_of_all_ranks(own, rank, num_ranks=4).view(4, 4, 2)  # from, to, expert of the receiver
    assert table[rank].equal(own.view(4, 2))
    assert table[:, rank].equal(own.view(4, 2))  # from rank j comes what was sent to rank j
    assert table.equal(table.transpose(0, 1))  # which holds for every pair of ranks
