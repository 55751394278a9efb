"""Routes from token counts. Legend: P ranks, V expert tensor parallel size, e local experts."""

import pytest
import torch

from megatron_lancet.model.dispatcher.distinct_rows import DistinctRoutes
from megatron_lancet.model.dispatcher.routes import Routes
from megatron_lancet.runtime.exchange import RowSplits
from megatron_lancet.runtime.transport.base import TokenCounts


def test_routes_of_two_ranks_with_two_experts_each():
    received = torch.tensor([[1, 2], [3, 4]])
    routes = Routes.of(TokenCounts([[5, 6], [7, 0]], received.tolist(), received), tp_size=1, tp_rank=0)
    assert routes.splits == RowSplits(sent=(11, 7), received=(3, 7))
    assert routes.rows_by_source.equal(received)
    assert routes.rows_by_expert_tp_rank == (10,)
    assert routes.rows_per_expert.tolist() == [4, 6]


def test_routes_make_each_order_of_rows_once():
    received = torch.tensor([[1, 2], [3, 4]])
    routes = Routes.of(TokenCounts([[0], [0]], received.tolist(), received), tp_size=1, tp_rank=0)
    order = routes.expert_order()
    assert routes.expert_order(last_expert_first=True) is not order
    assert routes.expert_order() is order


@pytest.mark.parametrize("tp_rank", [0, 1, 2])
def test_routes_with_expert_tp_equal_sums_of_counts(tp_rank):
    num_ranks, tp_size, num_experts = 2, 3, 4
    sent_P1e = torch.randint(9, (num_ranks, 1, num_experts))
    received_PVe = torch.randint(9, (num_ranks, tp_size, num_experts))
    sent = sent_P1e.expand(-1, tp_size, -1).flatten(0, 1)  # all holders of an expert get the same counts
    received = received_PVe.flatten(0, 1)
    routes = Routes.of(TokenCounts(sent.tolist(), received.tolist(), received), tp_size, tp_rank)
    assert routes.splits.sent == tuple(sent_P1e.sum(dim=(1, 2)).tolist())
    assert routes.splits.received == tuple(received_PVe[:, tp_rank].sum(dim=1).tolist())
    assert routes.rows_by_source.equal(received_PVe.transpose(0, 1).reshape(-1, num_experts))
    assert routes.rows_by_expert_tp_rank == tuple(received_PVe.sum(dim=(0, 2)).tolist())
    assert routes.rows_per_expert.equal(received_PVe.sum(dim=(0, 1)))
    assert routes.num_rows == int(received_PVe[:, tp_rank].sum())


@pytest.mark.parametrize("tp_rank", [0, 1])
def test_distinct_routes_have_rows_with_and_without_duplicates(tp_rank):
    """Of 2 x 2 ranks, counts of distinct rows in front of those for each of two experts."""
    received = torch.tensor([[3, 3, 1], [2, 0, 2], [5, 4, 5], [1, 1, 1]])
    sent = [[4, 4, 2]] * 2 + [[6, 5, 6]] * 2
    routes = DistinctRoutes.of(TokenCounts(sent, received.tolist(), received), 2, tp_rank, 2)
    assert routes.splits == RowSplits(sent=(4, 6), received=((3, 5), (2, 1))[tp_rank])
    assert routes.rows_by_expert_tp_rank == (8, 3)
    assert routes.rows_per_expert.tolist() == [8, 9]
    assert routes.num_rows == (13, 4)[tp_rank]
