"""Experts of a rank: one after the other as in Megatron, or, where they are small, together by torch's grouped GEMM.

Megatron's own grouped experts need Transformer Engine; with the local spec ``--moe-grouped-gemm`` builds sequential
experts. These keep their weights apart, so a grouped GEMM has to copy them into one tensor first. It pays where calling
the experts one by one costs more than that: ``benchmarks/experts.py`` and its results say where.

Legend of shapes: m rows of all local experts, e local experts, I inputs, O outputs of a linear layer, H hidden.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.transformer.moe.experts import SequentialMLP
from torch.nn import functional

from megatron_lancet.model.linear import DeferredColumnParallelLinear, DeferredRowParallelLinear

DeferredLinear = DeferredColumnParallelLinear | DeferredRowParallelLinear

MIN_EXPERTS = 4
MAX_WEIGHT_BYTES = 192 * 1024
MAX_ROWS_PER_EXPERT = 64
_ALIGNMENT_BYTES = 16
"""Of the strides that torch.nn.functional.grouped_mm takes."""


def grouped_is_faster(num_experts: int, num_rows: int, weight: torch.Tensor) -> bool:
    """Whether a grouped GEMM over copied weights beats one GEMM per expert.

    Measured on a CPU (benchmarks/README.md): calling an expert costs a fixed time, copying its weight a time that
    grows with it. It was not measured on CUDA, where sequential experts stay.

    Args:
        num_experts: e.
        num_rows: m.
        weight: [O, I] of one expert; the others' have its shape.
    """
    strides_fit = all(size * weight.element_size() % _ALIGNMENT_BYTES == 0 for size in weight.shape)
    return (
        weight.device.type == "cpu"
        and strides_fit
        and num_experts >= MIN_EXPERTS
        and weight.nbytes <= MAX_WEIGHT_BYTES
        and num_rows <= num_experts * MAX_ROWS_PER_EXPERT
    )


class GroupingSequentialMLP(SequentialMLP):
    """Megatron's sequential experts; in training small ones run together.

    On a CPU the GEMMs give the same bits. Activations may not: which elements of a tensor torch computes without
    vector instructions, and rounds in another way, depends on the tensor's size.
    """

    def forward(
        self, permuted_local_hidden_states: torch.Tensor, tokens_per_expert: torch.Tensor, permuted_probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the local experts.

        Args:
            permuted_local_hidden_states: [m, H], ordered by expert.
            tokens_per_expert: [e], on the host.
            permuted_probs: [m].

        Returns:
            [m, H], and no bias: it is added already.
        """
        layers = self._layers_to_group(permuted_local_hidden_states.size(0))
        if layers is None:
            return super().forward(permuted_local_hidden_states, tokens_per_expert, permuted_probs)
        offsets = tokens_per_expert.cumsum(0, dtype=torch.int32)
        # An expert's own forward, of which only the linear layers differ: activations and probabilities work by rows.
        together = copy.copy(self.local_experts[0])
        together._modules = {
            **together._modules,
            **{name: _GroupedLinear(linears, offsets) for name, linears in layers.items()},
        }
        return together(permuted_local_hidden_states, permuted_probs)

    def _layers_to_group(self, num_rows: int) -> dict[str, list[DeferredLinear]] | None:
        """The experts' linear layers by name, None where the experts run one after the other."""
        if not torch.is_grad_enabled() or self.config.moe_apply_probs_on_input:
            return None
        layers = {
            name: [getattr(expert, name) for expert in self.local_experts] for name in ("linear_fc1", "linear_fc2")
        }
        for linears in layers.values():
            if not grouped_is_faster(len(linears), num_rows, linears[0].weight):
                return None
            for linear in linears:
                if getattr(linear, "deferred", None) is None or linear.bias is not None:
                    return None
        return layers


class _GroupedLinear(torch.nn.Module):
    """The same linear layer of all local experts, for the length of one forward pass."""

    def __init__(self, linears: Sequence[DeferredLinear], offsets: torch.Tensor) -> None:
        super().__init__()
        self._linears = tuple(linears)
        self._offsets = offsets

    def forward(self, input: torch.Tensor) -> tuple[torch.Tensor, None]:
        """[m, I] to [m, O]; no bias."""
        weights = [linear.weight for linear in self._linears]
        return _GroupedLinearWithDeferredWeightGrad.apply(input, self._offsets, self._defer, *weights), None

    def _defer(self, grad_mO: torch.Tensor, input_mI: torch.Tensor) -> None:
        """Puts the dWs of all experts as one task."""
        weights = [linear.deferred for linear in self._linears if linear.deferred is not None]
        assert len(weights) == len(self._linears), "experts of which some are not deferred run one after the other"

        def compute() -> None:
            weight_grads_eOI = functional.grouped_mm(grad_mO.t(), input_mI, offs=self._offsets)
            for weight, weight_grad_OI in zip(weights, weight_grads_eOI, strict=True):
                weight.add_to_main_grad(weight_grad_OI)

        self._linears[0].store.put(weights[0], compute, grad_mO.nbytes + input_mI.nbytes, *weights[1:])


class _GroupedLinearWithDeferredWeightGrad(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input_mI: torch.Tensor,
        offsets: torch.Tensor,
        defer: Callable[[torch.Tensor, torch.Tensor], None],
        *weights_OI: torch.Tensor,
    ) -> torch.Tensor:
        stacked_eOI = torch.stack(weights_OI)
        ctx.save_for_backward(input_mI, offsets, stacked_eOI)
        ctx.defer = defer
        return functional.grouped_mm(input_mI, stacked_eOI.transpose(1, 2), offs=offsets)

    @staticmethod
    def backward(ctx: Any, grad_mO: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input_mI, offsets, stacked_eOI = ctx.saved_tensors
        grad_mO = grad_mO.contiguous()
        grad_mI = functional.grouped_mm(grad_mO, stacked_eOI, offs=offsets)
        ctx.defer(grad_mO, input_mI.contiguous())
        return grad_mI, None, None, *(None for _ in stacked_eOI)
