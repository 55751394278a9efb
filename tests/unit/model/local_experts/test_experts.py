"""Experts on a CPU that run layer by layer, against stock's one after the other: outputs and all gradients."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from megatron_lancet.errors import UsageError
from megatron_lancet.model.linear import can_defer
from megatron_lancet.model.local_experts import grouped_linear
from megatron_lancet.model.local_experts import module as experts
from megatron_lancet.patching import replaced
from megatron_lancet.runtime import device
from tests.unit.model.local_experts.pair import BF16, HIDDEN, Pair, check_equal, sequential_experts

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


@pytest.fixture(params=["one by one", "layer by layer", "grouped GEMMs"])
def pair(one_rank, request):
    with replaced(device, "_is_cuda", lambda device: request.param == "grouped GEMMs"):
        pair = Pair()
        pair.ours.may_group = request.param != "one by one"
        pair.run([5, 3, 1, 7])
        yield pair


def test_weight_that_is_frozen_later_gets_no_gradient(pair):
    """Megatron decides on each call."""
    for model in (pair.stock, pair.ours):
        model.local_experts[1].linear_fc2.weight.requires_grad_(False)
    ours = pair.run([5, 3, 1, 7])
    assert not pair.ours.local_experts[1].linear_fc2.weight.main_grad.any()
    check_equal(ours, pair.run_stock([5, 3, 1, 7]), 1e-6)
    pair.ours.local_experts[1].linear_fc2.weight.requires_grad_(True)
    pair.stock.local_experts[1].linear_fc2.weight.requires_grad_(True)
    check_equal(pair.run([5, 3, 1, 7]), pair.run_stock([5, 3, 1, 7]), 1e-6)


GRADIENT_HOOKS = {
    "register_hook": lambda grad: grad,
    "register_post_accumulate_grad_hook": lambda weight: weight.grad,
}


@pytest.mark.parametrize("register", GRADIENT_HOOKS)
@pytest.mark.parametrize("fused", [False, True])
def test_later_gradient_hook_gets_the_weight_gradient(pair, register, fused):
    name = "local_experts.2.linear_fc1.weight"
    for linear in pair.linears:
        linear.gradient_accumulation_fusion = fused
    weight, seen = pair.ours.get_parameter(name), []
    getattr(weight, register)(lambda of_hook: seen.append(GRADIENT_HOOKS[register](of_hook).clone()))
    with mock.patch("megatron_lancet.model.linear._accumulate_fused", lambda grad, rows, to: to.add_(grad.t() @ rows)):
        ours = pair.run([5, 3, 1, 7])
    check_equal(ours, pair.run_stock([5, 3, 1, 7]), 1e-6)
    (gradient,) = seen
    assert torch.equal(gradient, ours[name])


@pytest.mark.parametrize("register", GRADIENT_HOOKS)
def test_weight_with_a_gradient_hook_is_not_deferred(one_rank, register):
    linear = sequential_experts(2, {}).local_experts[0].linear_fc1
    assert can_defer(linear)
    handle = getattr(linear.weight, register)(lambda _: None)
    assert not can_defer(linear)
    handle.remove()
    assert can_defer(linear)
