"""Slots of experts: what leaves a router is by slot, and gradients come back by expert."""

import pytest
import torch

from megatron_lancet.features.placement.slots import Slots


def test_columns_follow_the_placement_and_gradients_come_back():
    slots = Slots((2, 0, 3, 1), rank=1, num_ranks=2)
    assert slots.local_experts == (3, 1)
    probs_tE = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.5, 0.0, 0.0, 0.5]], requires_grad=True)
    placed, routing_map = slots.routed(probs_tE, probs_tE > 0.25)
    assert placed.tolist() == probs_tE[:, [2, 0, 3, 1]].tolist()
    assert routing_map.tolist() == [[True, False, True, False], [False, True, True, False]]
    weights_tE = torch.arange(8.0).view(2, 4)
    (placed * weights_tE).sum().backward()
    assert probs_tE.grad.tolist() == [[1, 3, 0, 2], [5, 7, 4, 6]]


def test_experts_change_their_places():
    slots = Slots(range(4), rank=0, num_ranks=2)
    probs_tE = torch.rand(3, 4)
    assert torch.equal(slots.routed(probs_tE, probs_tE > 0.5)[0], probs_tE)
    slots.hold((3, 1, 2, 0))
    assert slots.local_experts == (3, 1)
    assert torch.equal(slots.routed(probs_tE, probs_tE > 0.5)[0], probs_tE[:, [3, 1, 2, 0]])
    with pytest.raises(AssertionError):
        slots.hold((0, 0, 1, 2))
