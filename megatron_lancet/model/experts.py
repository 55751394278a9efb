"""Runs the experts of a rank one after the other as Megatron does, or layer by layer where each has few rows.

Megatron's own grouped experts need Transformer Engine; with the local spec ``--moe-grouped-gemm`` builds sequential
experts, and calling one costs more than its arithmetic where it has few rows. Layer by layer, each expert is one GEMM
that reads and writes its rows of the whole, and what lies between the layers runs once for all experts. With many rows
that is slower: what one layer wrote has left the cache when the next one reads it. ``benchmarks/parts/experts.py``
measures it.

Legend of shapes: m rows of all local experts, e local experts, T rows of one expert, I inputs, O outputs of a linear
layer, H hidden.
"""

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.transformer.moe.experts import SequentialMLP

from megatron_lancet.model.linear import DeferredColumnParallelLinear, DeferredRowParallelLinear
from megatron_lancet.runtime.placement import on_cuda

DeferredLinear = DeferredColumnParallelLinear | DeferredRowParallelLinear

MAX_ROWS_PER_EXPERT = 128


def grouped_is_faster(num_experts: int, num_rows: int, weight: torch.Tensor) -> bool:
    """Whether experts run layer by layer faster than one after the other.

    Measured on a CPU (benchmarks/RESULTS.md). Not measured on CUDA, where experts stay sequential.

    Args:
        num_experts: local experts, e.
        num_rows: rows of all local experts, m.
        weight: weight of one expert; those of the others are alike.
    """
    return not on_cuda(weight) and num_experts > 1 and num_rows <= num_experts * MAX_ROWS_PER_EXPERT


class GroupingSequentialMLP(SequentialMLP):
    """Megatron's sequential experts; in training those with few rows run layer by layer.

    On a CPU the GEMMs give the same bits. Activations may not: which elements of a tensor torch computes without
    vector instructions, and rounds in another way, depends on the tensor's size.

    Attributes:
        may_group: False keeps the experts sequential. May change between steps.
    """

    may_group: bool = True

    def forward(
        self, permuted_local_hidden_states: torch.Tensor, tokens_per_expert: torch.Tensor, permuted_probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Runs the local experts.

        Args:
            permuted_local_hidden_states: [m, H], ordered by expert.
            tokens_per_expert: [e], on the host.
            permuted_probs: [m].

        Returns:
            Output [m, H]; None, because the bias has been added.
        """
        together = self._together() if self.may_group else None
        num_experts, num_rows = len(self.local_experts), permuted_local_hidden_states.size(0)
        weight = self.local_experts[0].linear_fc1.weight
        if together is None or not torch.is_grad_enabled() or not grouped_is_faster(num_experts, num_rows, weight):
            return super().forward(permuted_local_hidden_states, tokens_per_expert, permuted_probs)
        return together(permuted_local_hidden_states, tokens_per_expert.tolist(), permuted_probs)

    def _together(self) -> "_LayerByLayer | None":
        """Returns the local experts as one module, made on the first call; None where that is not possible."""
        if "_layer_by_layer" not in self.__dict__:
            # Not registered with Module: it is no part of the model and has no parameters of its own.
            self.__dict__["_layer_by_layer"] = self._make_together()
        return self.__dict__["_layer_by_layer"]

    def _make_together(self) -> "_LayerByLayer | None":
        layers = {
            name: [getattr(expert, name) for expert in self.local_experts] for name in ("linear_fc1", "linear_fc2")
        }
        every = [linear for linears in layers.values() for linear in linears]
        deferred = all(getattr(linear, "deferred", None) is not None and linear.bias is None for linear in every)
        if not deferred or self.config.moe_apply_probs_on_input:
            return None
        return _LayerByLayer(self.local_experts[0], layers)


class _LayerByLayer:
    """An expert's own forward with other linear layers: activations and probabilities work row by row."""

    def __init__(self, expert: torch.nn.Module, layers: dict[str, list[DeferredLinear]]) -> None:
        """
        Args:
            expert: any of the local experts.
            layers: linear layers of all local experts, by name.
        """
        self._linears = {name: _GroupedLinear(linears) for name, linears in layers.items()}
        self._forward = copy.copy(expert)
        self._forward._modules = {**expert._modules, **self._linears}

    def __call__(
        self, rows_mH: torch.Tensor, sizes: list[int], probs_m: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Maps rows [m, H] to outputs [m, H].

        Args:
            sizes: number of rows of each expert, e numbers.
        """
        for linear in self._linears.values():
            linear.sizes = sizes
        return self._forward(rows_mH, probs_m)


class _GroupedLinear(torch.nn.Module):
    """One linear layer of all local experts.

    Attributes:
        sizes: number of rows of each expert in the next forward pass, e numbers.
    """

    def __init__(self, linears: Sequence[DeferredLinear]) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self._linears = tuple(linears)

    def forward(self, input: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Maps [m, I] to [m, O]; there is no bias."""
        weights = [linear.weight for linear in self._linears]
        defer = functools.partial(self._defer, self.sizes)
        return _GroupedLinearWithDeferredWeightGrad.apply(input, defer, self.sizes, *weights), None

    def _defer(self, sizes: list[int], grad_mO: torch.Tensor, input_mI: torch.Tensor) -> None:
        """Puts the dW of each expert."""
        for linear, grad_TO, input_TI in zip(self._linears, grad_mO.split(sizes), input_mI.split(sizes), strict=True):
            linear._defer(grad_TO, input_TI)


class _GroupedLinearWithDeferredWeightGrad(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input_mI: torch.Tensor,
        defer: Callable[[torch.Tensor, torch.Tensor], None],
        sizes: list[int],
        *weights_OI: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(input_mI, *weights_OI)
        ctx.defer = defer
        ctx.sizes = sizes
        return _products(input_mI, sizes, [weight_OI.t() for weight_OI in weights_OI])

    @staticmethod
    def backward(ctx: Any, grad_mO: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input_mI, *weights_OI = ctx.saved_tensors
        grad_mI = _products(grad_mO, ctx.sizes, weights_OI)
        ctx.defer(grad_mO, input_mI)
        return grad_mI, None, None, *(None for _ in weights_OI)


def _products(rows_mX: torch.Tensor, sizes: list[int], factors_XY: Sequence[torch.Tensor]) -> torch.Tensor:
    """Each expert's rows times its factor: [m, Y]."""
    products_mY = rows_mX.new_empty(rows_mX.size(0), factors_XY[0].size(1))
    for rows_TX, factor_XY, product_TY in zip(rows_mX.split(sizes), factors_XY, products_mY.split(sizes), strict=True):
        torch.mm(rows_TX, factor_XY, out=product_TY)
    return products_mY
