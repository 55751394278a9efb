"""When deferred weight gradients run, and when their parameters are reported ready."""

import pytest
import torch

from megatron_lancet.runtime.weight_grad_store import DeferredWeight, WeightGradStore
from megatron_lancet.schedule.dw_queue import DwRules
from megatron_lancet.schedule.ops import Op, Phase
from megatron_lancet.schedule.plan import DwPolicy, Plan, Segment, fixed_plan
from megatron_lancet.testkit.virtual_gpu.device import virtual_gpu
from megatron_lancet.testkit.virtual_gpu.log import Kernel
from tests.fakes import cpu_stats, store_without_autograd

COMBINE, DISPATCH = (Op(3, 0, Phase.INPUT_GRAD, kind) for kind in ("combine", "dispatch"))


class Backward:
    """A store whose end-of-backward flush is called by hand, and a log of what it did."""

    def __init__(self, window: int, gaps: dict[str, tuple[str, ...]] | None = None) -> None:
        self.log: list[str] = []
        self.stats = cpu_stats()
        self.store = store_without_autograd(DwRules(window, gaps=gaps or {}), self.stats)

    def weight(self, name: str) -> DeferredWeight:
        parameter = torch.nn.Parameter(torch.zeros(2, 3))
        parameter.main_grad = torch.zeros(2, 3)
        return DeferredWeight(parameter, name, lambda: self.log.append(f"ready {name}"))

    def put(self, weight: DeferredWeight, chunk: int, num_bytes: int = 8) -> None:
        self.store.put([weight], lambda: self.log.append(f"dW {weight.name}.c{chunk}"), num_bytes)


@pytest.fixture
def backward():
    return Backward(window=2)


def test_fill_runs_oldest_dws_first_while_all_to_all_is_pending(backward):
    a, b = backward.weight("a"), backward.weight("b")
    backward.put(a, 1)
    backward.put(b, 1)
    backward.put(a, 0)
    busy = iter([True, True, False])
    backward.store.fill(lambda: next(busy), COMBINE)
    assert backward.log == ["dW a.c1", "dW b.c1"]
    assert len(backward.store) == 1
    assert backward.stats.take().num_dw_in_gaps == 2


def test_new_plan_is_followed_from_the_next_backward(backward):
    a = backward.weight("a")
    backward.store.configure(Plan(fixed_plan(1).segments, DwPolicy.NONE, dw_window=3))
    backward.put(a, 0)
    backward.store.mark_last_use(a)
    assert backward.log == ["dW a.c0", "ready a"]
    backward.store.configure(Plan((Segment(1, None, 2),), dw_window=1, dw_memory_bytes=10, gaps=()))
    backward.put(a, 1, num_bytes=8)
    backward.put(a, 0, num_bytes=8)
    assert backward.log[2:] == ["dW a.c1"]  # no room for both
    backward.store.mark_last_use(a)
    backward.store.advance_window()
    assert backward.log[2:] == ["dW a.c1", "dW a.c0", "ready a"]
    backward.store.flush()
    backward.put(a, 0)
    with pytest.raises(AssertionError, match=r"1 dW pending \['a'\]"):
        backward.store.configure(fixed_plan(2))


def test_window_bounds_the_number_of_pending_dws(backward):
    a = backward.weight("a")
    for chunk in range(10):
        backward.put(a, chunk, num_bytes=100)
        backward.store.advance_window()
        assert len(backward.store) <= 2
    backward.store.flush()
    assert backward.stats.take().peak_dw_bytes == 200


class Deferring(torch.autograd.Function):
    """Puts a dW into a store in its backward, and then fails if it is told so."""

    @staticmethod
    def forward(ctx, x, store, weight, fails=False):
        ctx.rest = store, weight, fails
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        store, weight, fails = ctx.rest
        store.put([weight], lambda: None, num_bytes=1)
        store.mark_last_use(weight)
        assert weight.num_pending == 1
        if fails:
            raise RuntimeError("out of memory")
        return grad, None, None, None


@pytest.fixture
def in_autograd():
    """A store, a weight of it, and a list that gets the store's length whenever the weight is reported."""
    store = WeightGradStore(DwRules(window=1), cpu_stats())
    ready: list[int] = []
    return store, DeferredWeight(torch.nn.Parameter(torch.zeros(1)), "w", lambda: ready.append(len(store))), ready


def test_autograd_flushes_at_the_end_of_backward(in_autograd):
    """With the real engine: pending inside the backward, nothing pending after it."""
    store, weight, ready = in_autograd
    Deferring.apply(torch.ones(1, requires_grad=True), store, weight).sum().backward()
    assert ready == [0]
    store.assert_idle()


def test_lost_flush_is_an_error(in_autograd, monkeypatch):
    store, weight, ready = in_autograd
    monkeypatch.setattr(store, "_flush_at_end_of_backward", lambda: None)
    Deferring.apply(torch.ones(1, requires_grad=True), store, weight).sum().backward()
    assert ready == []
    with pytest.raises(AssertionError, match=r"1 dW pending \['w'\], 1 weights not reported \['w'\]"):
        store.assert_idle()


def test_failed_backward_leaves_an_error(in_autograd):
    store, weight, ready = in_autograd
    with pytest.raises(RuntimeError, match="out of memory"):
        Deferring.apply(torch.ones(1, requires_grad=True), store, weight, True).sum().backward()
    assert ready == []
    with pytest.raises(AssertionError, match=r"1 dW pending \['w'\]"):
        store.assert_idle()


def test_failed_flush_leaves_an_error(backward):
    def fails():
        raise RuntimeError("out of memory")

    a = backward.weight("a")
    backward.store._flush_is_queued = True  # as autograd's callback has it
    backward.store.put([a], fails, num_bytes=8)
    with pytest.raises(RuntimeError, match="out of memory"):
        backward.store.flush()
    with pytest.raises(AssertionError, match="ended without its flush"):
        backward.store.assert_idle()


@pytest.mark.parametrize("autograd_made_one_too", [False, True])
def test_deferred_parameter_has_the_grad_that_ddp_requires(autograd_made_one_too):
    parameter = torch.nn.Parameter(torch.zeros(4, 2))
    parameter.main_grad = torch.zeros(4, 2)
    seen = []

    def ready():
        seen.append((parameter.grad.shape, parameter.grad_added_to_main_grad))
        parameter.grad = None

    weight = DeferredWeight(parameter, "w", ready)
    weight.add_to_main_grad(torch.ones(4, 2))
    if autograd_made_one_too:
        parameter.grad = torch.ones(4, 2)
    weight.report()
    # With the flag unset DDP adds .grad to main_grad itself.
    assert seen == [(torch.Size([4, 2]), not autograd_made_one_too)]
    assert parameter.main_grad.eq(1).all()


@pytest.mark.parametrize("num_tokens", [0, 5, 700])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_gemm", [False, True])
def test_weight_gradients_of_chunks_are_summed(num_tokens, dtype, in_gemm):
    """Within the GEMM where the types agree; a bf16 product is rounded before it is added, as in stock."""
    parameter = torch.nn.Parameter(torch.zeros(4, 8, dtype=dtype))
    before = torch.randn(4, 8)
    parameter.main_grad = before.clone()
    grad, input = torch.randn(num_tokens, 4, dtype=dtype), torch.randn(num_tokens, 8, dtype=dtype)
    DeferredWeight(parameter, "w", lambda: None).add_product(grad, input, in_gemm)
    stock = before + grad.t().matmul(input)
    if in_gemm and dtype is torch.float32:
        torch.testing.assert_close(parameter.main_grad, stock, rtol=1e-5, atol=1e-4)
    else:
        assert parameter.main_grad.equal(stock)


@pytest.mark.parametrize("late", ["nothing", "compute", "DDP"])
@pytest.mark.parametrize("window", [0, 2])
def test_reports_on_cuda_are_on_the_stream_of_ddp_behind_the_dws(window, late):
    with virtual_gpu() as gpu:
        ddp_stream = gpu.Stream()
        parameter = torch.nn.Parameter(torch.zeros(2, 3).cuda())
        parameter.main_grad = torch.zeros(2, 3).cuda()
        with torch.cuda.stream(ddp_stream):
            weight = DeferredWeight(parameter, "a", lambda: parameter.main_grad.mul_(0.5))
        store = store_without_autograd(DwRules(window), cpu_stats())
        with gpu.watch({"nothing": (), "compute": (gpu.default,), "DDP": (ddp_stream,)}[late]):
            for _ in range(2):
                store.put([weight], lambda: parameter.main_grad.add_(1), 8)
            with torch.cuda.stream(ddp_stream):  # on which autograd runs the hook of the accumulation node
                store.mark_last_use(weight)
            store.advance_window()
            store.advance_window()
        scaled = [entry.stream for entry in gpu.log if isinstance(entry, Kernel) and entry.name == "mul_"]
        assert scaled == [ddp_stream.id]
        assert gpu.problems == []
        assert parameter.main_grad.eq(1).all()


def test_flush_ends_behind_gradients_that_reports_have_added():
    """A bias has a gradient of autograd; without overlapped reductions Megatron scales all gradients next."""
    with virtual_gpu() as gpu:
        ddp_stream = gpu.Stream()
        parameter = torch.nn.Parameter(torch.zeros(3).cuda())
        parameter.main_grad = torch.zeros(3).cuda()
        with torch.cuda.stream(ddp_stream):
            bias = DeferredWeight(parameter, "bias", lambda: parameter.main_grad.add_(parameter.grad))
        store = store_without_autograd(DwRules(2), cpu_stats())
        with gpu.watch((ddp_stream,)):
            parameter.grad = torch.ones(3).cuda()
            store.put([bias], lambda: None, 8)
            store.mark_last_use(bias)
            store.flush()
            parameter.main_grad.mul_(2)
        assert gpu.problems == []
        assert parameter.main_grad.eq(2).all()
