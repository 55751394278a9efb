"""Tensors of equally many rows in one message."""

import pytest
import torch

from megatron_lancet.runtime.packing import RowLayout


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
