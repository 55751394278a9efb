"""Experts that run together against the same experts one after the other: outputs and all gradients."""

import pytest
import torch

from megatron_lancet.patching import replaced
from megatron_lancet.runtime.weight_grad_store import WeightGradStore
from megatron_lancet.schedule.dw_queue import DwRules
from tests.fakes import cpu_stats
from tests.small_gpt import EXPERTS, SETTINGS, transformer_config

HIDDEN = SETTINGS["hidden_size"]


class Experts:
    """Megatron's experts with deferred dW, and what was reported to DDP."""

    def __init__(self, num_experts: int = 4, **settings) -> None:
        from megatron.core.process_groups_config import ProcessGroupCollection
        from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
        from megatron.core.transformer.mlp import MLPSubmodules
        from megatron.core.transformer.moe.experts import SequentialMLP

        from megatron_lancet.model.adopt import adopt
        from megatron_lancet.model.local_experts.module import GroupingSequentialMLP

        config = transformer_config(**{**EXPERTS, "num_moe_experts": num_experts, **settings})
        linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        groups = ProcessGroupCollection.use_mpu_process_groups()
        self.module = adopt(SequentialMLP(num_experts, config, linears, pg_collection=groups), GroupingSequentialMLP)
        self.keys = list(self.module.state_dict())
        self.ready: list[str] = []
        self.stats = cpu_stats()
        self.store = WeightGradStore(DwRules(window=1), self.stats)
        self.dtype = config.params_dtype
        for parameter in self.module.parameters():
            parameter.main_grad = torch.zeros(parameter.shape)

    def defer(self, which: str = "") -> "Experts":
        from megatron_lancet.model.linear import can_defer, defer_weight_grad

        for name, linear in list(self.module.named_modules()):
            if can_defer(linear) and which in name:
                defer_weight_grad(linear, name, self.store)
                linear.register_wgrad_accumulation_and_reduce_hooks(
                    lambda name=name, weight=linear.weight: (self.ready.append(name), setattr(weight, "grad", None))
                )
        return self

    def run(self, sizes: list[int], grouped: bool) -> list[torch.Tensor]:
        """Output, gradients of tokens and probabilities, and main gradients."""
        from megatron_lancet.model.local_experts import module as experts

        generator = torch.Generator().manual_seed(7)
        dtype = self.dtype
        tokens = torch.randn(sum(sizes), HIDDEN, generator=generator, dtype=dtype, requires_grad=True)
        probs = torch.rand(sum(sizes), generator=generator, dtype=dtype, requires_grad=True)
        self.ready.clear()
        for parameter in self.module.parameters():
            parameter.main_grad.zero_()
        with replaced(experts, "grouped_is_faster", lambda *_: grouped):
            output, bias = self.module(tokens, torch.tensor(sizes), probs)
        assert bias is None
        output.square().sum().backward()
        self.store.assert_idle()
        gradients = [parameter.main_grad.clone() for parameter in self.module.parameters()]
        return [output.detach(), tokens.grad, probs.grad, *gradients]


SIZES = [[5, 3, 1, 7], [0, 5, 0, 3], [16, 0, 0, 0], [0, 0, 0, 9], [0, 0, 0, 0]]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize(
    ("settings", "tolerance"),
    [
        ({}, 0.0),
        ({"params_dtype": torch.bfloat16, "bf16": True}, 0.0),
        # GELU of a slice: torch rounds the elements of a vector and those of the rest in two ways.
        ({"gated_linear_unit": True}, 1e-6),
    ],
    ids=["gelu", "bf16", "gated"],
)
def test_grouped_experts_equal_sequential_experts(one_rank, sizes, settings, tolerance):
    experts = Experts(**settings).defer()
    sequential, grouped = experts.run(sizes, grouped=False), experts.run(sizes, grouped=True)
    for ours, expected in zip(grouped, sequential, strict=True):
        assert (ours - expected).norm() <= tolerance * expected.norm()


def test_dws_of_grouped_experts_are_late_and_reported_once(one_rank):
    """Each weight is reported once, after its dW."""
    experts = Experts().defer()
    experts.run([2, 0, 3, 1], grouped=True)
    assert experts.stats.take().num_dw_late == 2 * 4
    assert sorted(experts.ready) == sorted(
        f"local_experts.{expert}.linear_fc{layer}" for expert in range(4) for layer in (1, 2)
    )


def test_checkpoint_keys_of_grouped_experts_equal_stock(one_rank):
    experts = Experts().defer()
    experts.run([2, 0, 3, 1], grouped=True)
    assert list(experts.module.state_dict()) == experts.keys


@pytest.mark.parametrize(
    ("make", "no_grad"),
    [
        (lambda: Experts().defer("linear_fc1"), False),
        (lambda: Experts().defer("local_experts.0"), False),
        (lambda: Experts(add_bias_linear=True).defer(), True),
        (lambda: Experts(num_experts=1).defer(), False),
        (lambda: Experts().defer(), True),
    ],
    ids=["one layer not deferred", "experts frozen", "bias", "one expert", "evaluation"],
)
def test_experts_that_cannot_be_grouped_run_sequentially(one_rank, monkeypatch, make, no_grad):
    from megatron_lancet.model.local_experts import grouped_linear
    from megatron_lancet.model.local_experts import module as experts

    monkeypatch.setattr(grouped_linear, "multiply_one_by_one", None)
    monkeypatch.setattr(experts, "grouped_is_faster", lambda *_: True)
    module = make().module
    with torch.no_grad() if no_grad else torch.enable_grad():
        output, _ = module(
            torch.randn(6, HIDDEN), torch.tensor([1, 0, 2, 3][-len(module.local_experts) :]), torch.rand(6)
        )
    assert output.shape == (6, HIDDEN)


@pytest.mark.parametrize(
    ("num_experts", "num_rows", "grouped"), [(2, 2 * 128, True), (2, 2 * 128 + 1, False), (4, 8, True)]
)
def test_experts_are_grouped_by_number_of_rows(num_experts, num_rows, grouped):
    from megatron_lancet.model.local_experts.module import grouped_is_faster

    assert grouped_is_faster(num_experts, num_rows) == grouped
