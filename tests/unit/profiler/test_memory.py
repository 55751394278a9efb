"""What autograd saves, by op."""

import torch

from megatron_lancet.profiler.memory import SavedActivations
from megatron_lancet.runtime.trace import Trace


def test_saved_storage_counts_once_for_op_that_saved_it_first():
    weight = torch.randn(8, 8, requires_grad=True)
    trace = Trace(torch.device("cpu"), 0)
    saved = SavedActivations(trace, [weight])
    with saved.counted():
        trace.begin_step()
        hidden = torch.randn(16, 8, requires_grad=True).square()  # saves its input
        trace.skip()
        product = hidden @ weight  # saves hidden; the weight is there anyway
        first = product.tanh()  # saves its output
        trace.end("first")
        second = first @ weight + hidden.view(-1, 8) @ weight  # both are saved already
        trace.end("second")
        third = second.exp()
        trace.end("third")
        third.sum().backward()
    rows_bytes = 16 * 8 * 4
    assert saved.bytes_by_op() == {"first": 2 * rows_bytes, "third": rows_bytes}


def test_reused_memory_counts_again():
    trace = Trace(torch.device("cpu"), 0)
    saved = SavedActivations(trace, [])
    with saved.counted():
        trace.begin_step()
        for _ in range(3):
            torch.ones(4, requires_grad=True).exp().sum().backward()
        trace.end("all")
    assert saved.bytes_by_op() == {"all": 3 * 16}
