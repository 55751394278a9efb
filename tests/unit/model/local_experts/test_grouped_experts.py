"""Experts on CUDA, by grouped GEMMs, against stock's sequential experts under Megatron's DDP.

Tensors are in the host's memory: ``device`` is told that they are on CUDA, and torch's ``grouped_mm`` knows both.
"""

from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from megatron_lancet.errors import UsageError
from megatron_lancet.patching import replaced
from megatron_lancet.runtime import device
from megatron_lancet.runtime.weight_grad_store import WeightGradStore
from megatron_lancet.schedule.dw_queue import DwRules
from megatron_lancet.schedule.ops import Op, OpKind, Phase
from tests.te_cpu import apex
from tests.unit.model.local_experts.pair import BF16, HIDDEN, Pair, check_equal

SIZES = [[5, 3, 1, 7], [0, 5, 0, 3], [16, 0, 0, 0], [0, 0, 0, 9], [0, 0, 0, 0]]


@pytest.fixture
def on_cuda(one_rank) -> Iterator[None]:
    with replaced(device, "_is_cuda", lambda device: True):
        yield


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


@pytest.mark.thorough
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
            replaced(device, "_is_cuda", lambda device, is_cuda=is_cuda: is_cuda),
            mock.patch.object(group, "finish_param_sync", autospec=True) as waited,
        ):
            pair.run(SIZES[0])
        waits.append([call.args[0] for call in waited.call_args_list])
    sequential, by_layer = waits
    assert by_layer == sequential
    assert set(sequential) == set(pair.ddp.bucket_groups)
    assert len(pair.ddp.bucket_groups) > 1


def test_gradient_hook_on_an_expert_with_replicas_is_refused(on_cuda, monkeypatch):
    """This rank would run expert by expert, and report gradients in another order than the replica does."""
    pair = Pair()
    pair.linears[2].weight.register_hook(lambda grad: grad)
    check_equal(pair.run(SIZES[0]), pair.run_stock(SIZES[0]), 1e-6)
    monkeypatch.setattr(pair.ours, "dp_group", mock.Mock(size=lambda: 2))
    with pytest.raises(UsageError, match="no gradient hook on experts that other ranks have too"):
        pair.run(SIZES[0])


def test_rows_and_gradients_may_be_views(on_cuda):
    """Their strides would not be those that grouped GEMMs take."""
    pair = Pair()
    sizes, message = SIZES[0], torch.randn(sum(SIZES[0]), HIDDEN + 1)
    probs = torch.ones(sum(sizes))
    pair.ours(message[:, :HIDDEN].requires_grad_(), torch.tensor(sizes), probs)[0].sum().backward()
    ours = [weight.main_grad.clone() for weight in pair.ours.parameters()]
    rows = torch.cat(message[:, :HIDDEN].detach().split(sizes[::-1])[::-1])
    pair.stock(rows, torch.tensor(sizes), probs)[0].sum().backward()
    for mine, weight in zip(ours, pair.stock.parameters(), strict=True):
        assert (mine - weight.grad).norm() <= 1e-6 * weight.grad.norm()


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


def test_dws_of_all_experts_are_one_task_with_all_names(on_cuda):
    """A plan may name any of them for a gap; traces and profiles name the first expert's."""
    pair = Pair()
    with mock.patch.object(pair.store, "put", wraps=pair.store.put) as put:
        pair.run(SIZES[0])
    names = [[weight.name for weight in call.args[0]] for call in put.call_args_list]
    assert names == [
        [f"local_experts.{expert}.{layer}" for expert in range(4)] for layer in ("linear_fc2", "linear_fc1")
    ]


def test_planned_gap_of_one_expert_takes_weight_gradients_of_all(on_cuda):
    pair = Pair(window=5)
    op = Op(1, 0, Phase.INPUT_GRAD, OpKind.DISPATCH)
    pair.store = WeightGradStore(
        DwRules(5, gaps={str(op): ("local_experts.2.linear_fc2", "local_experts.3.linear_fc2")}), pair.stats
    )
    for linear in pair.linears:
        linear.store = pair.store
    tokens, probs, grad = pair.inputs(SIZES[0])
    tokens.requires_grad_().register_hook(lambda _: pair.store.run_ahead(op))
    output, _ = pair.ours(tokens, torch.tensor(SIZES[0]), probs)
    output.backward(grad)
    times = pair.stats.take()
    assert (times.num_dw_in_gaps, times.num_dw_late) == (1, 1)


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


def test_fused_accumulation_gets_dense_rows(on_cuda, monkeypatch):
    """Apex's kernel reads them by address; rows of an expert may be a view of a message."""
    from megatron.core.tensor_parallel import layers

    monkeypatch.setattr(layers, "fused_weight_gradient_mlp_cuda", apex, raising=False)
    pair, sizes = Pair(), SIZES[0]
    for linear in pair.linears:
        linear.gradient_accumulation_fusion = True
    message, probs = torch.randn(sum(sizes), HIDDEN + 1), torch.ones(sum(sizes))
    grads = torch.randn(sum(sizes), HIDDEN + 1)[:, :HIDDEN]
    pair.ours(message[:, :HIDDEN].requires_grad_(), torch.tensor(sizes), probs)[0].backward(grads)
    ours = [weight.main_grad.clone() for weight in pair.ours.parameters()]
    rows, grads = (torch.cat(one.detach().split(sizes[::-1])[::-1]) for one in (message[:, :HIDDEN], grads))
    pair.stock(rows, torch.tensor(sizes), probs)[0].backward(grads)
    for mine, weight in zip(ours, pair.stock.parameters(), strict=True):
        assert (mine - weight.grad).norm() <= 1e-6 * weight.grad.norm()


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
    monkeypatch.setattr(device, "_major_capability", lambda device: major)
    weight = mock.Mock(dtype=dtype, device=torch.device("cuda"))
    assert device.has_grouped_gemm(weight) == expected
