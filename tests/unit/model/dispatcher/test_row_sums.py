"""Copies and sums of rows by place: equal to stock's, and by one kernel of a GPU, which Triton's interpreter runs."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.transformer.moe.moe_utils import permute, unpermute

from megatron_lancet.model.dispatcher.all_to_all import AllToAllDispatcher
from megatron_lancet.patching import replaced
from megatron_lancet.runtime.rows import sums as row_sums
from megatron_lancet.runtime.rows.sums import Places
from megatron_lancet.testkit.virtual_gpu.kernels import kernels_of_cuda
from tests.draws import examples
from tests.triton_kernels import ROW_SUMS, loaded_kernels
from tests.unit.model.dispatcher.simulated_ranks import Comm, group_of

NUM_EXPERTS, HIDDEN = 8, 12


def routing(num_tokens: int, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities and choice of experts, [tokens, experts]."""
    probs = torch.rand(num_tokens, NUM_EXPERTS)
    chosen = torch.zeros_like(probs, dtype=torch.bool).scatter_(1, probs.topk(topk).indices, True)
    return probs, chosen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("num_tokens", "topk"), [(9, 1), (9, 3), (64, 8)])
def test_permuted_rows_and_sums_have_stocks_bits(dtype, num_tokens, topk):
    dispatcher = AllToAllDispatcher(Comm(4), NUM_EXPERTS, 1, group_of(1))
    probs, chosen = routing(num_tokens, topk)
    hidden = torch.randn(num_tokens, 1, HIDDEN).to(dtype)
    weights = torch.randn(num_tokens * topk, HIDDEN).to(dtype)

    def ours(hidden, probs):
        (rows, probs_n), permutation = dispatcher.permute(hidden, probs, chosen, num_tokens * topk)
        return rows, probs_n, dispatcher.unpermute(rows * weights, permutation)

    def stocks(hidden, probs):
        flat = hidden.view(num_tokens, HIDDEN)
        rows, probs_n, ids, _, _ = permute(flat, chosen, probs=probs, num_out_tokens=num_tokens * topk)
        return rows, probs_n, unpermute(rows * weights, ids, flat.shape, routing_map=chosen).view(hidden.shape)

    found = []
    for run in (ours, stocks):
        leaves = [hidden.clone().requires_grad_(), probs.clone().requires_grad_()]
        outputs = run(*leaves)
        (outputs[2].float().square().sum() + (outputs[1] * outputs[0][:, 0]).sum()).backward()
        found.append([*outputs, *(leaf.grad for leaf in leaves)])
    for one, other in zip(*found, strict=True):
        assert one.equal(other)


@given(st.lists(st.integers(-1, 4), min_size=1, max_size=20))
@examples(60)
def test_rows_by_the_kernel_have_the_sums_of_index_add(places):
    """In fp32, in the same order, so with the same bits. Rows that are left over count nowhere."""
    places = sorted([0, *places], key=lambda place: place < 0)  # behind all others
    place_n = torch.tensor(places)
    num_rows = int((place_n >= 0).sum())
    at = Places(place_n.clamp(min=0), 5, place_n)
    rows = torch.randn(len(places), HIDDEN)
    expected = torch.zeros(5, HIDDEN).index_add_(0, place_n[:num_rows], rows[:num_rows])
    with kernels_of_cuda(), replaced(row_sums, "on_cuda", lambda _: True), replaced(row_sums, "LEAST_BYTES", 0):
        values = torch.randn(5, HIDDEN, requires_grad=True)
        at.copies(values).backward(rows)
        assert values.grad.equal(expected)
        rows = rows[:num_rows].requires_grad_()
        sums = at.sums(rows)
        assert sums.equal(expected)
        sums.backward(values.detach())
        assert rows.grad.equal(values.detach()[place_n[:num_rows]])


def test_deterministic_algorithms_sum_as_stock_does(monkeypatch):
    """On a GPU the sums of stock are then in another order, and in the type of the rows."""
    monkeypatch.setattr(row_sums, "on_cuda", lambda _: True)
    monkeypatch.setattr(row_sums, "LEAST_BYTES", 0)
    at = Places(torch.tensor([1, 0, 1]), 2)
    torch.use_deterministic_algorithms(True)
    try:
        at.sums(torch.ones(3, HIDDEN))
    finally:
        torch.use_deterministic_algorithms(False)
    assert "order" not in vars(at)
    with kernels_of_cuda():
        at.sums(torch.ones(3, HIDDEN))
    assert "order" in vars(at)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("width", "pitch"), [(16, 16), (2500, 2560), (1024, 1032)])
def test_kernel_sums_each_row_once_in_fp32(dtype, width, pitch):
    """Rows with a distance, as in a packed message; a place without rows; rows that are left over."""
    kernels = loaded_kernels(interpreted=True, name=ROW_SUMS)
    places = torch.tensor([3, 0, 3, 1, 3, 0, -1, -1])
    rows = torch.randn(len(places), pitch).to(dtype)[:, :width]
    order, ends = Places(places.clamp(min=0), 4, places).order
    sums = torch.full((4, width), torch.nan, dtype=dtype)
    kernels.launch(rows, order, ends, sums)
    expected = torch.zeros(4, width).index_add_(0, places[:6], rows[:6].float()).to(dtype)
    if dtype is torch.bfloat16:  # which the interpreter cuts off and does not round
        torch.testing.assert_close(sums, expected, rtol=2**-7, atol=0)
    else:
        assert sums.equal(expected)
