"""Transformer Engine's delayed weight gradients in our store, with a module that has the same interface."""

import copy
import queue

import pytest
import torch

from benchmarks.gradient_error import relative_errors
from megatron_lancet.runtime.comm import Comm
from megatron_lancet.runtime.weight_grad_store import WeightGradStore
from megatron_lancet.schedule.dw_queue import DwRules
from megatron_lancet.schedule.plan import Plan, Segment
from tests.fakes import cpu_stats
from tests.small_gpt import SEQ_LENGTH, VOCAB, small_gpt, transformer_config

MICRO_BATCH = 4


class OwnStore:
    """What the module calls its store."""

    def __init__(self, delays: bool) -> None:
        self.delays = delays
        self.calls: queue.Queue = queue.Queue()

    def delay_wgrad_compute(self) -> bool:
        return self.delays

    def put(self, tensors, function) -> None:
        self.calls.put((tensors, function))

    def pop(self):
        tensors, function = self.calls.get_nowait()
        return function(*tensors), tensors


class DelayingLinear(torch.nn.Module):
    """Linear layer that keeps dW and the bias gradient until backward_dw() is called."""

    def __init__(self, plain: torch.nn.Module, fused: bool = False, delays: bool = True) -> None:
        super().__init__()
        self.weight, self.bias = plain.weight, plain.bias
        self.wgrad_store = OwnStore(delays)
        self.fuse_wgrad_accumulation = fused
        self.wgrad_accumulation_and_reduce_hooks: list = []
        self.num_backward_dw = 0
        for parameter in (self.weight, self.bias):
            if parameter is not None:
                parameter.skip_backward_post_hook = True

    def register_wgrad_accumulation_and_reduce_hooks(self, hook) -> None:
        self.wgrad_accumulation_and_reduce_hooks.append(hook)

    def forward(self, input):
        # Like Megatron's row-parallel layer, which it replaces here: the bias is the caller's to add.
        output = DelayingFunction.apply(input, self.weight, self.bias, self)
        return output, None

    def backward_dw(self) -> None:
        self.num_backward_dw += 1
        (weight_grad, bias_grad), _ = self.wgrad_store.pop()
        if not self.fuse_wgrad_accumulation:
            self.weight.grad = weight_grad
        if self.bias is not None and self.bias.grad is None:
            self.bias.grad = bias_grad
        for hook in self.wgrad_accumulation_and_reduce_hooks:
            hook()


class DelayingFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, weight, bias, module):
        ctx.save_for_backward(input, weight)
        ctx.module = module
        output = input.matmul(weight.t())
        return output if bias is None else output + bias

    @staticmethod
    def backward(ctx, grad):
        input, weight = ctx.saved_tensors
        fused = ctx.module.fuse_wgrad_accumulation

        def compute(input, grad, outs):
            weight_grad = grad.flatten(0, -2).t().matmul(input.flatten(0, -2))
            if fused:
                outs[0].add_(weight_grad)
            return weight_grad, grad.flatten(0, -2).sum(dim=0)

        ctx.module.wgrad_store.put([input, grad, [weight.main_grad] if fused else []], compute)
        placeholder = torch.full_like(weight, float("nan")) if fused else None
        return grad.matmul(weight), placeholder, None, None


def with_ddp(model, deferred: bool):
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    config = DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=2000, delay_wgrad_compute=deferred)
    return DistributedDataParallel(model.config, config, model)


def main_grads(ddp) -> dict[str, torch.Tensor]:
    """After two steps of two micro-batches."""
    generator = torch.Generator().manual_seed(3)
    positions = torch.arange(SEQ_LENGTH).expand(MICRO_BATCH, -1)
    mask = torch.ones(1, 1, SEQ_LENGTH, SEQ_LENGTH).triu(1).bool()
    for _ in range(2):
        ddp.zero_grad_buffer()
        for last in (False, True):
            tokens = torch.randint(VOCAB, (MICRO_BATCH, SEQ_LENGTH + 1), generator=generator)
            for group in ddp.bucket_groups:
                group.is_last_microbatch = last
            ddp(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]).mean().backward()
        ddp.finish_grad_sync()
    return {name: parameter.main_grad.clone() for name, parameter in ddp.module.named_parameters()}


class Overlapping:
    """A dense model whose attention projections delay their own dW, run by a plan."""

    def __init__(self, plain, num_chunks: int, fused: bool, memory_bytes: int | None = None) -> None:
        from megatron_lancet.model.gpt import overlap

        model = small_gpt(transformer_config(num_layers=2))
        model.load_state_dict(plain.state_dict())
        for layer in model.decoder.layers:
            layer.self_attention.linear_proj = DelayingLinear(layer.self_attention.linear_proj, fused)
        self.delaying = [module for module in model.modules() if isinstance(module, DelayingLinear)]
        self.stats = cpu_stats()
        plan = Plan((Segment(1, None, num_chunks),), dw_window=1, dw_memory_bytes=memory_bytes)
        self.store = WeightGradStore.of(plan, self.stats)
        overlap(model, plan, Comm(None, self.store, self.stats, own_rank=0))
        self.ddp = with_ddp(model, deferred=True)


@pytest.mark.parametrize("memory_bytes", [None, 1], ids=["unbounded", "no room"])
@pytest.mark.parametrize("fused", [False, True], ids=["grad", "main_grad"])
@pytest.mark.parametrize("num_chunks", [1, 2])
def test_gradients_with_delayed_wgrad_equal_stock(one_rank, num_chunks, fused, memory_bytes, check_gradients):
    plain = small_gpt(transformer_config(num_layers=2))
    ours = Overlapping(plain, num_chunks, fused, memory_bytes)
    errors = relative_errors(main_grads(ours.ddp), main_grads(with_ddp(plain, deferred=False)))
    check_gradients(errors, 1e-6)
    for module in ours.delaying:
        assert module.num_backward_dw == 4 * num_chunks  # two steps of two micro-batches
        assert module.wgrad_store.calls.empty()
        assert module.wgrad_accumulation_and_reduce_hooks == []  # it would report once per chunk
    ours.store.assert_idle()
    assert (ours.stats.take().num_dw_early > 0) == (memory_bytes is not None)


@pytest.mark.parametrize("fused", [False, True], ids=["grad", "main_grad"])
def test_delayed_weight_and_bias_gradients_are_reported_once(fused):
    from megatron_lancet.model.delayed_wgrad import delays_own_weight_grad, feed_from

    plain = torch.nn.Linear(6, 4)
    module = DelayingLinear(copy.deepcopy(plain), fused)
    store, reported = WeightGradStore(DwRules(window=1), cpu_stats()), []
    assert delays_own_weight_grad(module)
    feed_from(module, "L1.W.linear", store)
    for name, parameter in module.named_parameters():
        parameter.main_grad = torch.zeros_like(parameter)
        module.register_wgrad_accumulation_and_reduce_hooks(
            lambda name=name, parameter=parameter: (reported.append(name), setattr(parameter, "grad", None))
        )
    chunks = [torch.randn(3, 2, 6), torch.randn(5, 2, 6)]
    sum(module(chunk)[0].square().sum() for chunk in chunks).backward()
    sum(plain(chunk).square().sum() for chunk in chunks).backward()
    torch.testing.assert_close(module.weight.main_grad, plain.weight.grad)
    torch.testing.assert_close(module.bias.main_grad, plain.bias.grad)
    assert reported == ["weight", "bias"]


def test_deferred_bytes_are_those_that_the_module_keeps():
    from megatron_lancet.model.delayed_wgrad import feed_from

    stats = cpu_stats()
    module = DelayingLinear(torch.nn.Linear(6, 4, bias=False), fused=True)
    module.weight.main_grad = torch.zeros(4, 6)
    feed_from(module, "W", WeightGradStore(DwRules(window=1), stats))
    module.register_wgrad_accumulation_and_reduce_hooks(lambda: None)
    module(torch.randn(10, 6))[0].sum().backward()
    assert stats.take().peak_dw_bytes == 10 * (6 + 4) * 4  # not main_grad, which stays anyway


def test_modules_without_delayed_wgrad_are_left_alone():
    from megatron_lancet.model.delayed_wgrad import delays_own_weight_grad

    assert not delays_own_weight_grad(torch.nn.Linear(2, 2))
    assert not delays_own_weight_grad(DelayingLinear(torch.nn.Linear(2, 2), delays=False))
    frozen = DelayingLinear(torch.nn.Linear(2, 2))
    frozen.requires_grad_(False)
    assert not delays_own_weight_grad(frozen)
