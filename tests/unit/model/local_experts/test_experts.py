"""Experts on a CPU that run layer by layer, against stock's one after the other: outputs and all gradients."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from megatron_lancet.errors import UsageError
from megatron_lancet.model.local_experts import grouped_linear
from megatron_lancet.model.local_experts import module as experts
from tests.unit.model.local_experts.pair import BF16, HIDDEN, Pair, check_equal

SIZES = [[5, 3, 1, 7], [0, 5, 0, 3], [16, 0, 0, 0], [0, 0, 0, 9], [0, 0, 0, 0]]


@pytest.mark.parametrize(
    ("settings", "tolerance"),
    [
        ({}, 0.0),
        (BF16, 0.0),
        # GELU of a slice: torch rounds the elements of a vector and those of the rest in two ways.
        ({"gated_linear_unit": True}, 1e-6),
    ],
    ids=["gelu", "bf16", "gated"],
)
def test_grouped_experts_equal_sequential_experts(one_rank, settings, tolerance):
    pair, multiply = Pair(**settings), grouped_linear.multiply_one_by_one
    for sizes in SIZES:
        with mock.patch.object(grouped_linear, "multiply_one_by_one", wraps=multiply) as together:
            check_equal(pair.run(sizes), pair.run_stock(sizes), tolerance)
        assert together.called
        assert pair.stats.take().num_dw_late == 2 * 4


@pytest.mark.parametrize(
    ("settings", "unfit", "no_grad", "num_replicas"),
    [
        ({}, "linear_fc2", False, 1),
        ({}, "local_experts.1", False, 1),
        ({"add_bias_linear": True}, None, True, 1),
        ({"num_experts": 1}, None, False, 1),
        ({}, None, True, 1),
        # By their rows some replicas would run layer by layer, and DDP would get gradients in unlike orders.
        ({}, None, False, 2),
    ],
    ids=["one layer not deferred", "experts frozen", "bias", "one expert", "evaluation", "replicas"],
)
def test_experts_that_cannot_be_grouped_run_sequentially(one_rank, monkeypatch, settings, unfit, no_grad, num_replicas):
    monkeypatch.setattr(grouped_linear, "multiply_one_by_one", None)
    monkeypatch.setattr(experts, "grouped_is_faster", lambda *_: True)
    module = Pair(deferred=lambda name: unfit is None or unfit not in name, **settings).ours
    module.dp_group = SimpleNamespace(size=lambda: num_replicas)
    sizes = [1, 0, 2, 3][-len(module.local_experts) :]
    with torch.no_grad() if no_grad else torch.enable_grad():
        output, _ = module(torch.randn(sum(sizes), HIDDEN), torch.tensor(sizes), torch.rand(sum(sizes)))
    assert output.shape == (sum(sizes), HIDDEN)


def test_evaluation_with_gradients_has_stocks_order_of_rows(one_rank, monkeypatch):
    """Megatron's own pass runs then, which sorts the first expert's rows first, also where experts can be grouped."""
    pair = Pair()
    assert pair.ours._together() is not None
    monkeypatch.setattr(pair.ours._together(), "can_group", True)
    assert pair.ours.last_expert_first
    pair.ours.eval()
    check_equal(pair.run([5, 3, 1, 7]), pair.run_stock([5, 3, 1, 7]), 0.0)


@pytest.mark.parametrize("part", ["local_experts.1", "local_experts.2.linear_fc1"])
@pytest.mark.parametrize(
    "register",
    [torch.nn.Module.register_forward_hook, torch.nn.Module.register_forward_pre_hook],
    ids=["forward", "forward pre-"],
)
def test_hooks_on_experts_that_run_together_are_refused(one_rank, part, register):
    pair = Pair()
    handle = register(pair.ours.get_submodule(part), lambda *_: None)
    with pytest.raises(
        UsageError, match=r"the forward (pre- )?hook .* would not run: the experts of a rank run together"
    ):
        pair.run([5, 3, 1, 7])
    handle.remove()
    check_equal(pair.run([5, 3, 1, 7]), pair.run_stock([5, 3, 1, 7]), 0.0)


@pytest.mark.parametrize(
    ("num_experts", "num_rows", "grouped"), [(2, 2 * 128, True), (2, 2 * 128 + 1, False), (4, 8, True)]
)
def test_experts_are_grouped_by_number_of_rows(num_experts, num_rows, grouped):
    assert experts.grouped_is_faster(num_experts, num_rows) == grouped
