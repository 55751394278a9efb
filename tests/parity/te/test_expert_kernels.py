"""Kernels of sixteen grouped experts of Transformer Engine, to which ours on CUDA are compared."""

import importlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch

from megatron_lancet.patching import around
from tests.kernel_counts import kernels
from tests.ranks import launch
from tests.small_gpt import EXPERTS, transformer_config

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]

NUM_EXPERTS, ROWS_PER_EXPERT = 16, 3
GROUPED_GEMM = "te_general_grouped_gemm"
SETTINGS: dict[str, Any] = {
    "num_layers": 1,
    "num_moe_experts": NUM_EXPERTS,
    "bf16": True,
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "moe_grouped_gemm": True,
    "gradient_accumulation_fusion": True,
}
OURS = 7 + 11 + 4
"""See ``unit/model/local_experts/test_expert_kernels``."""


@contextmanager
def with_grouped_gemms_as_one() -> Iterator[Counter[str]]:
    """Counts kernels, and each of Transformer Engine's grouped GEMMs as one: the stand-in has one for each expert."""
    transformer_engine_torch = importlib.import_module("transformer_engine_torch")

    inside: Counter[str] = Counter()
    num_calls: Counter[str] = Counter()

    def counted(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        num_calls[GROUPED_GEMM] += 1
        with kernels() as found:
            result = stock(*args, **kwargs)
        inside.update(found)
        return result

    with ExitStack() as stack:
        stack.enter_context(around(transformer_engine_torch, GROUPED_GEMM, counted))
        names = stack.enter_context(kernels())
        yield names
    names.subtract(inside)
    names.update(num_calls)


def kernels_of_grouped_experts() -> dict[str, Any]:
    """Kernels of Transformer Engine's grouped experts, forward and backward with dW accumulated in its GEMM."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.moe.experts import TEGroupedMLP
    from megatron.core.transformer.moe.moe_layer import MoELayer

    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    config = transformer_config(**{**EXPERTS, **SETTINGS})
    spec = get_moe_module_spec(use_te=True, num_experts=NUM_EXPERTS, moe_grouped_gemm=True)
    submodules = spec.keywords["submodules"] if hasattr(spec, "keywords") else spec.submodules
    groups = ProcessGroupCollection.use_mpu_process_groups()
    experts = MoELayer(config, submodules, layer_number=1, pg_collection=groups).experts
    assert isinstance(experts, TEGroupedMLP)
    for weight in experts.parameters():
        weight.main_grad = torch.zeros(weight.shape)
        weight.grad_added_to_main_grad = False
    rows = [ROWS_PER_EXPERT] * NUM_EXPERTS
    tokens = torch.randn(sum(rows), config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    probs = torch.rand(sum(rows), requires_grad=True)
    with with_grouped_gemms_as_one() as forward:
        output, _ = experts(tokens, torch.tensor(rows), probs)
    grad = torch.ones_like(output)
    with with_grouped_gemms_as_one() as backward:
        output.backward(grad)
    added = all(weight.grad_added_to_main_grad for weight in experts.parameters())
    return {"forward": +forward, "backward": +backward, "accumulated in the GEMM": added}


def test_experts_have_at_most_a_fifth_more_kernels_than_te(tmp_path):
    """Of Transformer Engine a grouped GEMM counts as one kernel, as forward and dX are on request; dW is sixteen."""
    (result,) = launch.results_of(kernels_of_grouped_experts, 1, tmp_path, timeout_s=100, te=launch.Te())
    forward, backward = result["forward"], result["backward"]
    assert result["accumulated in the GEMM"]
    assert (forward[GROUPED_GEMM], backward[GROUPED_GEMM]) == (2, 4)
    of_te = sum(forward.values()) + sum(backward.values())
    assert of_te == 7 + 13
    assert of_te * 1.2 >= OURS
    assert of_te * 2.2 >= 2 * OURS
