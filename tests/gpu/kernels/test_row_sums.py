"""Sums of rows by place: near the sums in 64 bits, and the same each time."""

import pytest
import torch

from megatron_lancet.runtime.rows import sums as row_sums
from megatron_lancet.runtime.rows.sums import Places
from tests.gpu.devices import ON_BOTH

NUM_ROWS, NUM_PLACES, NUM_LEFT_OVER, WIDTH = 3000, 700, 90, 520


@ON_BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sums_of_rows_are_near_those_in_64_bits(device, dtype, monkeypatch):
    monkeypatch.setattr(row_sums, "LEAST_BYTES", 0)
    place_n = torch.cat((torch.randint(NUM_PLACES - 1, (NUM_ROWS,)), torch.full((NUM_LEFT_OVER,), -1)))
    packed = torch.randn(len(place_n), WIDTH + 8).to(dtype)
    values = torch.randn(NUM_PLACES, WIDTH).to(dtype)
    packed_on_device, values_on_device = packed.cuda(), values.cuda().requires_grad_()
    at = Places(place_n.clamp(min=0).cuda(), NUM_PLACES, place_n.cuda())
    found = []
    with device.watch():
        for _ in range(2):
            rows = packed_on_device[:, :WIDTH]
            sums = at.sums(rows[:NUM_ROWS])
            (grad,) = torch.autograd.grad(at.copies(values_on_device), values_on_device, rows)
            found.append((sums, grad))
    expected = torch.zeros(NUM_PLACES, WIDTH, dtype=torch.float64)
    expected.index_add_(0, place_n[:NUM_ROWS], packed[:NUM_ROWS, :WIDTH].double())
    for sums, again in zip(*found, strict=True):
        torch.testing.assert_close(sums.cpu().double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-5)
        assert sums.cpu().equal(again.cpu())
        assert not sums[-1].any().item(), "a place without rows"
