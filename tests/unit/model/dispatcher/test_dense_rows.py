"""Received rows for kernels that read by address: dense, and without a reference to their message."""

from types import SimpleNamespace

import pytest
import torch

from megatron_lancet.model.dispatcher.all_to_all import AllToAllDispatcher
from megatron_lancet.model.dispatcher.routes import Routes
from megatron_lancet.runtime.rows.packing import RowLayout

NUM_RANKS, HIDDEN = 2, 8


def received(num_experts: int, dtype: torch.dtype):
    """Returns tokens and probabilities from a packed message, their values, and their routes."""
    routes = Routes.even(3, NUM_RANKS, num_experts // NUM_RANKS, 1, torch.device("cpu"))
    num_rows = int(routes.rows_per_expert.sum())
    sent = torch.randn(num_rows, HIDDEN).to(dtype), torch.rand(num_rows)
    layout = RowLayout.of(sent)
    return layout.unpack(layout.pack(sent)), sent, routes


def collected(rows, routes, num_experts: int, dense: bool):
    alone = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    dispatcher = AllToAllDispatcher(None, num_experts, NUM_RANKS, alone, dense=dense)
    return dispatcher.collect(rows, routes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_experts", [NUM_RANKS, 2 * NUM_RANKS])
def test_rows_for_kernels_without_strides_are_dense(num_experts, dtype):
    rows, sent, routes = received(num_experts, dtype)
    assert not any(tensor.is_contiguous() for tensor in rows)
    found = collected(rows, routes, num_experts, dense=True)
    for tensor in found:
        assert tensor.is_contiguous()
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize
    if num_experts == NUM_RANKS:
        assert all(actual.equal(expected) for actual, expected in zip(found, sent, strict=True))


def test_rows_of_one_expert_are_not_copied_for_strided_kernels():
    rows, _, routes = received(NUM_RANKS, torch.bfloat16)
    found = collected(rows, routes, NUM_RANKS, dense=False)
    assert [tensor.data_ptr() for tensor in found] == [tensor.data_ptr() for tensor in rows]
