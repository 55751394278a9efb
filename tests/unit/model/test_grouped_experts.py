"""Experts on CUDA, by grouped GEMMs, against stock's sequential experts under Megatron's DDP.

Tensors are in the host's memory: ``placement`` is told that they are on CUDA, and torch's ``grouped_mm`` knows both.
"""

from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from megatron_lancet.patching import replaced
from megatron_lancet.runtime import placement
from megatron_lancet.runtime.weight_grad_store import WeightGradStore
from megatron_lancet.schedule.dw_queue import DwRules
from tests.fakes import cpu_stats
from tests.small_gpt import EXPERTS, SETTINGS, transformer_config

HIDDEN = SETTINGS["hidden_size"]
SIZES = [[5, 3, 1, 7], [0, 5, 0, 3], [16, 0, 0, 0], [0, 0, 0, 9], [0, 0, 0, 0]]
BF16 = {"params_dtype": torch.bfloat16, "bf16": True}


@pytest.fixture
def on_cuda(one_rank) -> Iterator[None]:
    with replaced(placement, "_is_cuda", lambda device: True):
        yield


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

    def __init__(self, num_experts: int = 4, window: int = 1, ddp: dict | None = None, **settings) -> None:
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
            if can_defer(linear):
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


def grouped_gemms():
    """Counts calls of ``grouped_mm``."""
    from megatron_lancet.model.local_experts import grouped_linear

    return mock.patch.object(grouped_linear, "grouped_mm", wraps=grouped_linear.grouped_mm)


SHARDED = {"use_distributed_optimizer": True}
BUCKETS = {**SHARDED, "overlap_grad_reduce": True, "bucket_size": 5000}
DDP = {
    "DDP": {},
    "distributed optimizer": SHARDED,
    "buckets side by side": BUCKETS,
    "padded buckets": {**BUCKETS, "pad_buckets_for_high_nccl_busbw": True},
}
MODELS = {
    "fp32": ({}, 1e-6),
    "gated": ({"gated_linear_unit": True}, 1e-6),
    "bf16": ({**BF16, "gated_linear_unit": True, "activation_func": torch.nn.functional.silu}, 0.004),
}


@pytest.mark.parametrize("ddp", DDP.values(), ids=list(DDP))
@pytest.mark.parametrize(("settings", "tolerance"), MODELS.values(), ids=list(MODELS))
def test_grouped_experts_equal_stock_under_ddp(on_cuda, settings, tolerance, ddp):
    pair = Pair(ddp=ddp, **settings)
    keys = list(pair.stock.state_dict())
    for sizes in SIZES:
        check_equal(pair.run(sizes), pair.run_stock(sizes), tolerance)
    assert list(pair.ours.state_dict()) == keys
    for name, weight in pair.stock.named_parameters():
        assert torch.equal(weight, pair.ours.get_parameter(name))


@pytest.mark.parametrize(
    ("ddp", "num_gemms"),
    [
        # Forward, dX and dW of two layers.
        (DDP["DDP"], 6),
        (DDP["distributed optimizer"], 6),
        (DDP["buckets side by side"], 6),
        # Three weights a bucket: of each layer two runs of two experts, at two distances.
        (DDP["padded buckets"], 12),
    ],
    ids=list(DDP),
)
def test_experts_with_weights_side_by_side_are_one_gemm(on_cuda, ddp, num_gemms):
    pair = Pair(ddp=ddp)
    with grouped_gemms() as gemms:
        pair.run(SIZES[0])
    assert gemms.call_count == num_gemms
    assert pair.stats.take().num_dw_late == 2


@pytest.mark.parametrize("cuda", [False, True], ids=["cpu", "cuda"])
def test_layers_of_experts_wait_for_gathered_parameters(one_rank, cuda):
    """As sequential experts do, by hooks of DDP on their linear layers, and in their order."""
    pair = Pair(ddp={**BUCKETS, "overlap_param_gather": True})
    waits = []
    for is_cuda, may_group in ((False, False), (cuda, True)):
        pair.ours.may_group = may_group
        group = type(pair.ddp.bucket_groups[0])
        with (
            replaced(placement, "_is_cuda", lambda device, is_cuda=is_cuda: is_cuda),
            mock.patch.object(group, "finish_param_sync", autospec=True) as waited,
        ):
            pair.run(SIZES[0])
        waits.append([call.args[0] for call in waited.call_args_list])
    sequential, by_layer = waits
    assert by_layer == sequential
    assert set(sequential) == set(pair.ddp.bucket_groups)
    assert len(pair.ddp.bucket_groups) > 1


def test_recomputed_grouped_experts_equal_stock(on_cuda):
    from megatron_lancet.model.recompute import maybe_recomputed

    pair = Pair()
    with grouped_gemms() as gemms:
        ours = pair.run(SIZES[0], step=lambda experts, *rows: maybe_recomputed(True, experts, *rows))
    assert gemms.call_count == 8
    check_equal(ours, pair.run_stock(SIZES[0]), 1e-6)


@pytest.mark.parametrize("in_gemm", [False, True])
def test_weight_gradients_of_several_uses_are_summed(on_cuda, in_gemm):
    pair = Pair(**BF16)
    for linear in pair.linears:
        linear.has_several_uses, linear.accumulate_in_gemm = True, in_gemm
    ours, stock = pair.run(SIZES[0], num_chunks=3), pair.run_stock(SIZES[0], num_chunks=3)
    check_equal(ours, {**stock, "output": pair.run_stock(SIZES[0])["output"]}, 0.004)


def test_fused_accumulation_keeps_one_kernel_per_weight(on_cuda, monkeypatch):
    from megatron_lancet.model import linear as linears

    pair = Pair()
    for linear in pair.linears:
        linear.gradient_accumulation_fusion = True
    monkeypatch.setattr(
        linears,
        "_accumulate_fused",
        lambda grad, rows, main_grad: main_grad.add_(grad.t() @ rows),
    )
    with grouped_gemms() as gemms:
        ours = pair.run(SIZES[0])
    assert gemms.call_count == 4
    assert pair.stats.take().num_dw_late == 8
    check_equal(ours, pair.run_stock(SIZES[0]), 1e-6)


@pytest.mark.parametrize(
    ("settings", "capability", "num_gemms"),
    [
        ({"ffn_hidden_size": 66}, True, 0),
        ({}, False, 0),
        ({"deterministic_mode": True}, True, 0),
        ({"moe_apply_probs_on_input": True, "moe_router_topk": 1, "moe_router_pre_softmax": True}, True, 0),
        ({"num_experts": 1}, True, 0),
        ({}, True, 6),
    ],
    ids=["rows not aligned", "device", "deterministic", "probs on input", "one expert", "grouped"],
)
def test_experts_that_grouped_gemms_cannot_run_equal_stock(on_cuda, monkeypatch, settings, capability, num_gemms):
    from megatron_lancet.model.local_experts import grouped_linear

    monkeypatch.setattr(grouped_linear, "has_grouped_gemm", lambda weight: capability)
    pair = Pair(**settings)
    pair.ours.may_group = "deterministic_mode" not in settings
    sizes = SIZES[0][: len(pair.ours.local_experts)]
    assert pair.ours.last_expert_first == bool(num_gemms)
    with grouped_gemms() as gemms:
        check_equal(pair.run(sizes), pair.run_stock(sizes), 1e-6)
    assert gemms.call_count == num_gemms


def test_evaluated_experts_take_rows_in_their_own_order(on_cuda):
    pair = Pair()
    tokens, probs, _ = pair.inputs(SIZES[0])
    with torch.no_grad():
        assert not pair.ours.last_expert_first
        output, _ = pair.ours(tokens, torch.tensor(SIZES[0]), probs)
        expected, _ = pair.stock(tokens, torch.tensor(SIZES[0]), probs)
    assert torch.equal(output, expected)


@pytest.mark.parametrize(
    ("dtype", "major", "expected"),
    [
        (torch.bfloat16, 8, False),
        (torch.bfloat16, 9, True),
        (torch.bfloat16, 10, True),
        (torch.bfloat16, 12, False),
        (torch.float32, 9, False),
        (torch.float16, 9, False),
    ],
)
def test_grouped_gemm_is_known_by_type_and_device(monkeypatch, dtype, major, expected):
    monkeypatch.setattr(placement, "_major_capability", lambda device: major)
    weight = mock.Mock(dtype=dtype, device=torch.device("cuda"))
    assert placement.has_grouped_gemm(weight) == expected
