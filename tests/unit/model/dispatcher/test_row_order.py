"""One index in place of Megatron's split and concatenation of a part for each source and expert."""

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import sort_chunks_by_idxs

from megatron_lancet.model.dispatcher.row_order import RowOrder, by_expert


def test_row_order_of_two_sources_and_two_experts():
    order = RowOrder.by_expert(torch.tensor([[2, 1], [0, 3]]), 6)
    rows = torch.tensor([0, 0, 1, 11, 12, 13])  # the expert of each row, that from source 1 in the tens
    assert order.apply(rows).tolist() == [0, 0, 1, 11, 12, 13]
    order = RowOrder.by_expert(torch.tensor([[1, 2], [2, 1]]), 6)
    assert order.apply(torch.tensor([0, 1, 1, 10, 10, 11])).tolist() == [0, 10, 10, 1, 1, 11]
    order = RowOrder.by_expert(torch.tensor([[1, 2], [2, 1]]), 6, last_expert_first=True)
    assert order.apply(torch.tensor([0, 1, 1, 10, 10, 11])).tolist() == [1, 1, 11, 0, 10, 10]


@pytest.mark.parametrize("last_expert_first", [False, True])
@pytest.mark.parametrize(("num_sources", "num_experts"), [(1, 3), (2, 2), (4, 5), (3, 1)])
def test_row_order_and_its_gradients_equal_megatrons_sort_to_bit(num_sources, num_experts, last_expert_first):
    sizes = torch.randint(4, (num_sources, num_experts))
    sizes[0, 0] = 0  # an expert without a row from a source
    num_rows = int(sizes.sum())
    parts = torch.arange(num_sources * num_experts).view(num_sources, num_experts)
    expert_major = by_expert(parts, last_expert_first).ravel()
    packed = torch.randn(num_rows, 9)
    tokens, probs = packed[:, :8].requires_grad_(), packed[:, 8].requires_grad_()  # views, as of a received message
    order = RowOrder.by_expert(sizes, num_rows, last_expert_first)
    ours = order.apply(tokens), order.apply(probs)
    stocks = sort_chunks_by_idxs(tokens, sizes.ravel(), expert_major, probs=probs)
    undone = order.undo(ours[0].sin())
    stocks_undone, _ = sort_chunks_by_idxs(
        stocks[0].sin(), by_expert(sizes, last_expert_first).ravel(), expert_major.argsort()
    )
    assert ours[0].equal(stocks[0])
    assert ours[1].equal(stocks[1])
    assert undone.equal(stocks_undone)
    grads = torch.randn_like(undone), torch.randn_like(probs)
    for mine, theirs in zip(
        torch.autograd.grad((undone, ours[1]), (tokens, probs), grads),
        torch.autograd.grad((stocks_undone, stocks[1]), (tokens, probs), grads),
        strict=True,
    ):
        assert mine.equal(theirs)


def test_row_order_needs_no_value_of_the_counts_on_the_host():
    """A read of a value on the host would raise here, and on a GPU it would wait for the device."""
    order = RowOrder.by_expert(torch.empty(4, 3, dtype=torch.long, device="meta"), 7)
    rows = torch.empty(7, 5, device="meta", requires_grad=True)
    order.undo(order.apply(rows)).sum().backward()
    assert rows.grad.shape == rows.shape


def test_row_order_has_one_kernel_for_rows_in_each_direction():
    order = RowOrder.by_expert(torch.full((4, 3), 2), 24)
    rows = torch.randn(24, 5, requires_grad=True)
    with torch.autograd.profiler.profile() as profile:
        (grad,) = torch.autograd.grad(order.apply(rows), rows, torch.ones(24, 5))
    ran = [event.name for event in profile.function_events if event.name.startswith("aten::")]
    assert [name for name in ran if name.startswith("aten::index")] == ["aten::index_select"] * 2, ran
    assert grad.eq(1).all()
