"""Tensors of equally many rows in one message."""

from unittest import mock

import pytest
import torch

from megatron_lancet.runtime.all_to_all import AllToAll
from megatron_lancet.runtime.comm import Comm
from megatron_lancet.runtime.exchange import RowSplits
from megatron_lancet.runtime.rows.packing import RowLayout
from megatron_lancet.schedule.ops import Op, OpKind, Phase
from tests.fakes import Loopback, cpu_stats


@pytest.mark.parametrize("num_rows", [0, 1, 5])
@pytest.mark.parametrize(
    "rows",
    [
        [((8,), torch.float32), ((), torch.float32)],
        [((7,), torch.bfloat16), ((), torch.float32)],  # 14 bytes: what follows must be aligned all the same
        [((), torch.float64), ((3, 2), torch.bfloat16), ((5,), torch.float32)],
    ],
    ids=["fp32", "bf16-odd", "three"],
)
def test_unpack_returns_the_packed_tensors(num_rows, rows):
    tensors = [torch.randn(num_rows, *shape).to(dtype) for shape, dtype in rows]
    layout = RowLayout.of(tensors)
    packed = layout.pack(tensors)
    assert packed.is_contiguous()
    assert len(packed) == num_rows
    for before, after in zip(tensors, layout.unpack(packed), strict=True):
        assert after.dtype == before.dtype
        assert after.equal(before)


def test_packed_rows_keep_their_place():
    """Any rows of a message are a message: it is cut between ranks, and comes in parts of several ranks."""
    tokens, probs = torch.arange(12.0).view(4, 3), torch.arange(4.0)
    layout = RowLayout.of((tokens, probs))
    packed = layout.pack((tokens, probs))
    some_tokens, some_probs = layout.unpack(torch.cat([packed[2:], packed[:1]]))
    assert some_tokens.equal(tokens[[2, 3, 0]])
    assert some_probs.equal(probs[[2, 3, 0]])


def test_pack_accepts_transposed_tensors():
    tokens, probs = torch.arange(12.0).view(3, 4).t(), torch.ones(4)
    layout = RowLayout.of((tokens, probs))
    assert layout.unpack(layout.pack((tokens, probs)))[0].equal(tokens)


def test_pack_does_not_copy_a_single_tensor():
    tensor = torch.ones(3, 2)
    layout = RowLayout.of((tensor,))
    assert layout.pack((tensor,)).data_ptr() == tensor.data_ptr()
    assert layout.unpack(tensor)[0].equal(tensor)


def test_bytes_on_the_wire_equal_the_packed_rows():
    """Of dispatch and combine, forward and backward, in the counters and in the trace."""
    stats = cpu_stats()
    comm = Comm(Loopback(), None, stats, own_rank=0)
    comm.trace = mock.MagicMock()
    hidden = torch.randn(4, 256, requires_grad=True)
    probs = torch.rand(4, requires_grad=True)
    splits = RowSplits(sent=(1, 3), received=(1, 3))
    dispatch, combine = (
        AllToAll(comm, Op(1, 0, Phase.FORWARD, kind), splits) for kind in (OpKind.DISPATCH, OpKind.COMBINE)
    )
    rows, weights = dispatch.wait(dispatch.launch(hidden, probs))
    (output,) = combine.wait(combine.launch(rows * weights.unsqueeze(1)))
    output.sum().backward()
    num_bytes = {  # 256 hidden states, and in a dispatch the probability, or its gradient, in 16 bytes
        "L1.c0.F.dispatch": 3 * (1024 + 16),
        "L1.c0.F.combine": 3 * 1024,
        "L1.c0.I.combine": 3 * 1024,
        "L1.c0.I.dispatch": 3 * (1024 + 16),
    }
    assert {call.args[0]: call.args[1] for call in comm.trace.sent.call_args_list} == num_bytes
    assert stats.take().payload_bytes == sum(num_bytes.values())
