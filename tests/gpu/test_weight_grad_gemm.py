"""The GEMM that adds a chunk's weight gradient of bf16 operands to an fp32 gradient: a kernel that only CUDA has."""

import pytest
import torch

from megatron_lancet.runtime.weight_grad_store import DeferredWeight

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and sees one only in make test-gpu"),
]
NUM_OUTPUTS, NUM_INPUTS = 1024, 2048


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_tokens", [0, 7, 512])
def test_weight_gradient_gemm_adds_to_fp32_without_a_temporary(num_tokens, dtype):
    parameter = torch.nn.Parameter(torch.zeros(NUM_OUTPUTS, NUM_INPUTS, dtype=dtype, device="cuda"))
    before = torch.randn(NUM_OUTPUTS, NUM_INPUTS, device="cuda")
    parameter.main_grad = before.clone()
    grad = torch.randn(num_tokens, NUM_OUTPUTS, device="cuda").to(dtype)
    input = torch.randn(num_tokens, NUM_INPUTS, device="cuda").to(dtype)
    exact = before.double() + grad.double().t() @ input.double()
    weight = DeferredWeight(parameter, "w", lambda: None)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        weight.add_product(grad, input, in_gemm=True)
    operators = {event.key for event in profile.key_averages()}
    assert "aten::addmm" in operators
    assert operators.isdisjoint({"aten::mm", "aten::matmul", "aten::add_", "aten::copy_"})  # no temporary, no copy
    torch.testing.assert_close(parameter.main_grad.double(), exact, rtol=1e-4, atol=1e-3)
    if num_tokens == 512:  # the bound would see a product that was rounded to the operands' type
        rounded = before + grad.t() @ input
        assert (rounded.double() - exact).abs().max() > 1e-2
