"""Launch and wait: what travels, in which order, forward and mirrored."""

import pytest
import torch

from megatron_lancet.runtime.all_to_all import AllToAll
from megatron_lancet.runtime.comm import Comm
from megatron_lancet.runtime.exchange import RowSplits
from megatron_lancet.runtime.transport.base import ReadyEvent
from megatron_lancet.schedule.ops import Op, Phase
from tests.fakes import Loopback, cpu_stats


def make():
    transport, stats = Loopback(factor=2.0), cpu_stats()
    return Comm(transport, None, stats, own_rank=0), transport, stats


SPLITS = RowSplits(sent=(1, 3), received=(1, 3))


def exchange(comm, chunk=0):
    return AllToAll(comm, Op(1, chunk, Phase.FORWARD, "dispatch"), SPLITS)


def test_wait_returns_received_rows_and_backward_their_gradients():
    comm, _, _ = make()
    x = torch.arange(8.0).view(4, 2).requires_grad_()
    a = exchange(comm)
    (y,) = a.wait(a.launch(x))
    assert y.equal(2 * x.detach())
    y.backward(torch.full_like(y, 3.0))
    assert x.grad.equal(torch.full((4, 2), 6.0))


def test_several_tensors_are_one_all_to_all():
    comm, _, stats = make()
    tokens, probs = torch.ones(4, 2, requires_grad=True), torch.ones(4, requires_grad=True)
    a = exchange(comm)
    got_tokens, got_probs = a.wait(a.launch(tokens, probs))
    (got_tokens.sum() + 5 * got_probs.sum()).backward()
    assert tokens.grad.eq(2).all()
    assert probs.grad.eq(10).all()
    times = stats.take()
    assert times.num_all_to_alls == 2  # forward and backward
    assert times.payload_bytes == 2 * 3 * 32  # three rows leave this rank, there and back, in 16-byte parts


def test_backward_launches_and_waits_in_mirrored_order():
    """Two chunks: in the backward, too, one computes while the other's gradients are on the wire."""
    comm, transport, _ = make()
    log = transport.log

    class Compute(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, name):
            ctx.name = name
            log.append(f"F {name}")
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            log.append(f"B {ctx.name}")
            return grad, None

    inputs = [torch.ones(4, 2, requires_grad=True) for _ in range(2)]
    exchanges = [exchange(comm, chunk) for chunk in range(2)]
    on_the_wire = []
    for chunk in range(2):
        on_the_wire.append(exchanges[chunk].launch(Compute.apply(inputs[chunk], f"before c{chunk}")))
    outputs = []
    for chunk in range(2):
        (y,) = exchanges[chunk].wait(on_the_wire[chunk])
        outputs.append(Compute.apply(y, f"after c{chunk}"))
    assert log == ["F before c0", "launch", "F before c1", "launch", "wait", "F after c0", "wait", "F after c1"]
    log.clear()
    sum(y.sum() for y in outputs).backward()
    assert log == ["B after c1", "launch", "B after c0", "launch", "wait", "B before c1", "wait", "B before c0"]


def test_all_to_all_of_no_rows_returns_no_rows():
    comm, _, _ = make()
    x = torch.empty(0, 2, requires_grad=True)
    a = AllToAll(comm, Op(1, 0, Phase.FORWARD, "dispatch"), RowSplits(sent=(0, 0), received=(0, 0)))
    (y,) = a.wait(a.launch(x))
    y.sum().backward()
    assert y.shape == x.grad.shape == (0, 2)


class PendingSplits:
    """Four rows, which the launch does not know yet."""

    def __init__(self, comm: Comm) -> None:
        counts = torch.tensor([4])
        self.counts = comm.launch_counts(Op(1, 0, Phase.FORWARD, "counts"), lambda: counts, ReadyEvent(counts))
        self.counts.transfer.arrive()

    def splits(self) -> RowSplits:
        return SPLITS


def test_rows_that_are_not_sent_have_gradient_zero():
    """The number of rows may be known after the rows were made."""
    comm, _, stats = make()
    tokens, probs = torch.ones(6, 2, requires_grad=True), torch.ones(6, requires_grad=True)
    a = AllToAll(comm, Op(1, 0, Phase.FORWARD, "dispatch"), PendingSplits(comm))
    got_tokens, got_probs = a.wait(a.launch(tokens, probs))
    assert (len(got_tokens), len(got_probs)) == (4, 4)
    (got_tokens.sum() + 5 * got_probs.sum()).backward()
    assert tokens.grad.tolist() == [[2, 2]] * 4 + [[0, 0]] * 2
    assert probs.grad.tolist() == [10] * 4 + [0] * 2
    assert stats.take().payload_bytes == 2 * 3 * 32


def test_wait_names_the_op_of_a_lost_peer():
    comm, transport, _ = make()
    a = exchange(comm, chunk=1)
    ticket = a.launch(torch.ones(4, 2, requires_grad=True))
    transport.error = RuntimeError("Connection closed by peer")
    with pytest.raises(RuntimeError, match=r"L1\.c1\.F\.dispatch did not complete.*Connection closed by peer"):
        a.wait(ticket)
    assert comm.position == "waiting for L1.c1.F.dispatch (layer 1, chunk 1, forward, dispatch)"
