"""Stock's local experts, and ours with the same weights under Megatron's DDP."""

import torch

from megatron_lancet.runtime.weight_grad_store import WeightGradStore
from megatron_lancet.schedule.dw_queue import DwRules
from tests.fakes import cpu_stats
from tests.small_gpt import EXPERTS, SETTINGS, transformer_config

HIDDEN = SETTINGS["hidden_size"]
BF16 = {"params_dtype": torch.bfloat16, "bf16": True}


def sequential_experts(num_experts: int, settings: dict):
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import SequentialMLP

    config = transformer_config(**{**EXPERTS, "num_moe_experts": num_experts, **settings})
    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return SequentialMLP(num_experts, config, linears, pg_collection=groups)


class Pair:
    """Stock's experts with autograd's gradients, and ours with the same weights in Megatron's DDP.

    Attributes:
        stats: counters of the store of our dWs.
    """

    def __init__(
        self, num_experts: int = 4, window: int = 1, ddp: dict | None = None, deferred=lambda name: True, **settings
    ) -> None:
        """
        Args:
            deferred: whether the linear layer with this name defers its dW.
        """
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

        from megatron_lancet.model.adopt import adopt
        from megatron_lancet.model.linear import can_defer, defer_weight_grad
        from megatron_lancet.model.local_experts.module import GroupingSequentialMLP

        self.stock = sequential_experts(num_experts, settings)
        self.ours = adopt(sequential_experts(num_experts, settings), GroupingSequentialMLP)
        self.ours.load_state_dict(self.stock.state_dict())
        self.ours.may_group = True
        self.stats = cpu_stats()
        self.store = WeightGradStore(DwRules(window), self.stats)
        for name, linear in list(self.ours.named_modules()):
            if can_defer(linear) and deferred(name):
                defer_weight_grad(linear, name, self.store)
        ddp_config = DistributedDataParallelConfig(
            delay_wgrad_compute=True, **{"grad_reduce_in_fp32": True, "bucket_size": None, **(ddp or {})}
        )
        self.ddp = DistributedDataParallel(self.ours.config, ddp_config, self.ours)

    @property
    def linears(self) -> list:
        return [linear for expert in self.ours.local_experts for linear in (expert.linear_fc1, expert.linear_fc2)]

    def inputs(self, sizes: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(7)
        dtype = self.ours.config.params_dtype
        tokens = torch.randn(sum(sizes), HIDDEN, generator=generator).to(dtype)
        grad = torch.randn(sum(sizes), HIDDEN, generator=generator).to(dtype)
        return tokens, torch.rand(sum(sizes), generator=generator), grad

    def run_stock(self, sizes: list[int], num_chunks: int = 1) -> dict[str, torch.Tensor]:
        """Output and gradients of tokens, probabilities and weights."""
        tokens, probs, grad = self.inputs(sizes)
        tokens.requires_grad_(), probs.requires_grad_()
        self.stock.zero_grad()
        for _ in range(num_chunks):
            output, _ = self.stock(tokens, torch.tensor(sizes), probs)
            output.backward(grad)
        weights = {name: weight.grad for name, weight in self.stock.named_parameters()}
        return {"output": output.detach(), "tokens": tokens.grad, "probs": probs.grad, **weights}

    def run(self, sizes: list[int], num_chunks: int = 1, step=None) -> dict[str, torch.Tensor]:
        """The same of ours, whose rows come in the order that it asks for.

        Args:
            step: runs the experts' forward pass, given as a function of rows and probabilities.
        """
        tokens, probs, grad = (
            torch.cat(rows.split(sizes)[::-1]) if self.ours.last_expert_first else rows for rows in self.inputs(sizes)
        )
        order = sizes[::-1] if self.ours.last_expert_first else sizes
        tokens.requires_grad_(), probs.requires_grad_()
        self.ddp.zero_grad_buffer()
        outputs = []
        for _ in range(num_chunks):
            experts = lambda tokens, probs: self.ours(tokens, torch.tensor(sizes), probs)[0]  # noqa: E731
            outputs.append(step(experts, tokens, probs) if step else experts(tokens, probs))
        torch.autograd.backward(outputs, [grad] * num_chunks)
        self.store.assert_idle()
        if self.ddp.ddp_config.overlap_grad_reduce:
            self.ddp.finish_grad_sync()
        rows = {"output": outputs[0].detach(), "tokens": tokens.grad, "probs": probs.grad}
        if order != sizes or self.ours.last_expert_first:
            rows = {name: torch.cat(value.split(order)[::-1]) for name, value in rows.items()}
        weights = self.ours.named_parameters()
        return {**rows, **{name: weight.main_grad.clone() for name, weight in weights if weight.requires_grad}}


def check_equal(ours: dict[str, torch.Tensor], stock: dict[str, torch.Tensor], tolerance: float) -> None:
    assert list(ours) == [name for name in stock if stock[name] is not None]
    for name, value in ours.items():
        expected = stock[name].float()
        assert (value.float() - expected).norm() <= tolerance * expected.norm(), name
