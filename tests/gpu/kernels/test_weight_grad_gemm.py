"""The GEMM that adds a chunk's weight gradient of bf16 operands to an fp32 gradient: a kernel that only CUDA has."""

import pytest
import torch

from megatron_lancet.runtime.weight_grad_store import DeferredWeight
from megatron_lancet.testkit.virtual_gpu.log import Kernel
from tests.gpu.devices import ON_BOTH

NUM_OUTPUTS, NUM_INPUTS = 512, 1024


def kernels_of(device, run) -> set[str]:
    """Names of what ``run`` enqueues, without the operators that only allocate or look at memory."""
    if device.is_virtual:
        with device.watch():
            run()
            return {entry.name for entry in device.gpu.log if isinstance(entry, Kernel)}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    kernels = {"addmm", "mm", "matmul", "add_", "copy_"}
    return {event.key.removeprefix("aten::") for event in profile.key_averages()} & kernels


@ON_BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_tokens", [0, 7, 512])
def test_weight_gradient_gemm_adds_to_fp32_without_a_temporary(device, num_tokens, dtype):
    parameter = torch.nn.Parameter(torch.zeros(NUM_OUTPUTS, NUM_INPUTS, dtype=dtype, device="cuda"))
    before = torch.randn(NUM_OUTPUTS, NUM_INPUTS, device="cuda")
    parameter.main_grad = before.clone()
    grad = torch.randn(num_tokens, NUM_OUTPUTS, device="cuda").to(dtype)
    input = torch.randn(num_tokens, NUM_INPUTS, device="cuda").to(dtype)
    exact = before.double() + grad.double().t() @ input.double()
    weight = DeferredWeight(parameter, "w", lambda: None)
    assert kernels_of(device, lambda: weight.add_product(grad, input, in_gemm=True)) == {"addmm"}
    torch.testing.assert_close(parameter.main_grad.double(), exact, rtol=1e-4, atol=1e-3)
    if num_tokens == 512:  # the bound would see a product that was rounded to the operands' type
        rounded = before + grad.t() @ input
        assert (rounded.double() - exact).abs().max() > 1e-2
