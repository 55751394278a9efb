"""Which operators compute a deferred weight gradient and add it to Megatron's ``main_grad``.

torch has the GEMM that adds a product of bf16 to fp32 for CUDA only. Here it is called with meta tensors and does not
run, and runs with a substitute of its numbers; ``tests/gpu`` has the test of the kernel.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_lancet.runtime import weight_grad_store
from megatron_lancet.runtime.weight_grad_store import DeferredWeight

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
INTO_FP32, IN_PLACE, APART = ["addmm.dtype_out"], ["addmm_.default"], ["mm.default", "add_.Tensor"]


class Operators(TorchDispatchMode):
    """Names of the operators that write, and the tensors that they take and write."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.tensors: list[dict[str, torch.Tensor]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is not torch.ops.aten.t.default:
            self.names.append(func.__name__)
            named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False))
            self.tensors.append({**named, **(kwargs or {})})
        if func is torch.ops.aten.addmm.dtype_out:
            return kwargs["out"]  # torch 2.11 mistakes the type for a factor on the meta device
        return func(*args, **(kwargs or {}))


def deferred(main_grad: torch.Tensor) -> DeferredWeight:
    parameter = torch.nn.Parameter(torch.zeros_like(main_grad))
    parameter.main_grad = main_grad
    return DeferredWeight(parameter, "w", lambda: None)


@pytest.mark.parametrize(
    ("device", "in_gemm", "gradient", "operands", "expected"),
    [
        ("meta", True, FP32, BF16, INTO_FP32),
        ("meta", True, FP32, FP16, INTO_FP32),
        ("meta", True, BF16, BF16, IN_PLACE),
        ("meta", True, FP32, FP32, IN_PLACE),
        ("meta", True, BF16, FP32, APART),
        ("meta", False, FP32, BF16, APART),  # one chunk: in stock's order of additions
        ("cpu", True, FP32, BF16, APART),
        ("cpu", True, FP32, FP32, IN_PLACE),
    ],
)
def test_weight_gradient_gemm_depends_on_types_and_device(device, in_gemm, gradient, operands, expected):
    main_grad = torch.zeros(4, 8, dtype=gradient, device=device)
    grad, input = (torch.ones(5, size, dtype=operands, device=device) for size in (4, 8))
    weight = deferred(main_grad)
    with torch.no_grad(), Operators() as found:
        weight.add_product(grad, input, in_gemm)
    assert found.names == expected
    if expected is INTO_FP32:
        (tensors,) = found.tensors
        assert tensors["self"] is tensors["out"] is main_grad
        assert tensors["out_dtype"] is FP32
        assert (tensors["mat1"].shape, tensors["mat1"].dtype) == ((4, 5), operands)
        assert tensors["mat2"] is input


def test_weight_gradient_gemm_is_not_used_where_torch_lacks_it(monkeypatch):
    has_gemm = weight_grad_store._has_gemm_into_fp32.__wrapped__
    assert has_gemm("meta")
    assert not has_gemm("cpu")
    monkeypatch.setattr(torch._C, "_dispatch_has_kernel", lambda operator: operator != "aten::addmm.dtype_out")
    assert not has_gemm("meta")


@pytest.mark.parametrize("num_tokens", [0, 5, 700])
def test_weight_gradient_gemm_adds_the_unrounded_product(num_tokens, monkeypatch):
    """With a substitute of the operator's numbers: two chunks are summed, and no product is rounded to bf16."""

    def addmm(self, mat1, mat2, *, out_dtype, out):
        assert out_dtype is out.dtype
        return torch.add(self, mat1.to(out_dtype) @ mat2.to(out_dtype), out=out)

    monkeypatch.setattr(torch, "addmm", addmm)
    monkeypatch.setattr(weight_grad_store, "_has_gemm_into_fp32", lambda device_type: True)
    before = torch.randn(4, 8)
    chunks = [[torch.randn(num_tokens, size, dtype=BF16) for size in (4, 8)] for _ in range(2)]
    in_gemm, rounded = deferred(before.clone()), deferred(before.clone())
    for grad, input in chunks:
        in_gemm.add_product(grad, input, in_gemm=True)
        rounded.add_product(grad, input)
    exact = before.double() + sum(grad.double().t() @ input.double() for grad, input in chunks)
    torch.testing.assert_close(in_gemm.main_grad.double(), exact, rtol=1e-5, atol=1e-4)
    if num_tokens == 700:  # the bound would see a rounded product
        assert (rounded.main_grad.double() - exact).abs().max() > 1e-2
