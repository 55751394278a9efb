"""Gradients with settings that GPU runs enable and CPU runs disable: ours against stock, EP=2 on two ranks."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_lancet.patching import around, replaced
from tests.gradient_deviations import TOLERANCE
from tests.parity.gpu_defaults import fused_softmax
from tests.parity.gpu_defaults.cases import CASES, INTERPRETED
from tests.parity.gradients import gradients_worker
from tests.parity.gradients.connections import parallel
from tests.parity.gradients.gradients_worker import compare
from tests.ranks import launch
from tests.te_cpu.attention import fused_attention
from tests.te_cpu.dense import check_dense

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(620)]

FEW = {"MICRO_BATCH": 2, "NUM_MICRO_BATCHES": 1, "SEQ_LENGTH": 4}
_SOFTMAX_LENGTH = 32
"""Megatron's fused softmax needs more than 16 keys."""


class FastLayerNorm(torch.autograd.Function):
    """Apex's persistent LayerNorm, which reads by address; its C++ checks that tensors are dense."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor, epsilon: float) -> torch.Tensor:
        check_dense("FastLayerNorm", "x", x)
        ctx.save_for_backward(x, gamma, beta)
        ctx.epsilon = epsilon
        return torch.nn.functional.layer_norm(x, gamma.shape, gamma, beta, epsilon)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        leaves = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            y = torch.nn.functional.layer_norm(leaves[0], leaves[1].shape, leaves[1], leaves[2], ctx.epsilon)
        return *torch.autograd.grad(y, leaves, dy.contiguous()), None


@contextmanager
def persistent_norms() -> Iterator[None]:
    """Gives local layers Megatron's fused norms, as with apex."""
    from megatron.core.fusions import fused_layer_norm
    from megatron.core.models import backends
    from megatron.core.models.gpt import gpt_layer_specs

    norm = fused_layer_norm.FusedLayerNorm
    with (
        mock.patch.multiple(fused_layer_norm, create=True, FastLayerNormFN=FastLayerNorm, HAVE_PERSIST_LAYER_NORM=True),
        mock.patch.multiple(backends, LNImpl=norm, FusedLayerNorm=norm),
        mock.patch.multiple(gpt_layer_specs, LNImpl=norm),
    ):
        yield


@contextmanager
def masked_softmax() -> Iterator[None]:
    """Enables Megatron's fused softmax, with sequences of a supported length.

    The type check accepts fp32 as 16 bits, so chunks compare without rounding to bf16.
    """
    from megatron.core.fusions.fused_softmax import FusedScaleMaskSoftmax

    def in_16_bits(stock: Callable[..., bool], softmax: Any, *sizes: Any) -> bool:
        softmax.input_in_float16 = True
        return stock(softmax, *sizes)

    names = "scaled_upper_triang_masked_softmax_cuda", "scaled_masked_softmax_cuda"
    with (
        mock.patch.dict(sys.modules, dict.fromkeys(names, fused_softmax)),
        mock.patch.object(fused_softmax, "forward", wraps=fused_softmax.forward) as forward,
        around(FusedScaleMaskSoftmax, "is_kernel_available", in_16_bits),
        replaced(gradients_worker, "SEQ_LENGTH", _SOFTMAX_LENGTH),
    ):
        yield
    assert forward.called, "Megatron used its unfused softmax"


@contextmanager
def attention_of_a_gpu() -> Iterator[None]:
    """Lets Transformer Engine choose any attention, including a fused kernel."""
    with mock.patch.dict(os.environ), fused_attention():
        for kind in ("FLASH", "FUSED", "UNFUSED"):
            os.environ.pop(f"NVTE_{kind}_ATTN", None)  # Megatron sets these when it builds a model
        yield


_CONTEXTS = {
    "persist-norm": persistent_norms,
    "masked-softmax": masked_softmax,
    "attention-backend": attention_of_a_gpu,
}


def run(name: str) -> dict[str, Any]:
    from megatron.core.transformer.enums import AttnBackend

    overrides, num_chunks, cut = CASES[name]
    if "attention_backend" in overrides:
        overrides = {**overrides, "attention_backend": AttnBackend[overrides["attention_backend"]]}
    with ExitStack() as stack:
        context = _CONTEXTS.get(name.split("/")[0])
        if context is not None:
            stack.enter_context(context())
        for constant, value in (FEW if name in INTERPRETED else {}).items():
            stack.enter_context(replaced(gradients_worker, constant, value))
        return compare(overrides, num_chunks, **cut)


def all_results() -> dict[str, Any]:
    """What is found for each case, by its name."""
    with parallel({"expert_model_parallel_size": 2}):
        return {name: run(name) for name in CASES}


results = launch.results(all_results, 2, timeout_s=600, te=launch.Te())
"""Per rank: what is found for each case."""


@pytest.mark.parametrize("case", CASES)
def test_gradients_with_defaults_of_gpus_equal_stock(results, case, check_gradients):
    check_gradients.equal_stock(results, case, 0.0 if "k=1" in case.split("/") else TOLERANCE)
    assert all(result[case]["zero_gradients"] == [] for result in results)
