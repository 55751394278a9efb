"""One linear layer of all local experts: forward, dX and the deferred dW, each as one grouped GEMM where possible.

On CUDA ``torch.nn.functional.grouped_mm`` multiplies all experts' rows in one kernel, with weights and main gradients
that lie side by side (``adjacent.py``). Elsewhere each expert is a GEMM that reads and writes its rows of the whole.

Legend of shapes: m rows of all local experts, e local experts, j neighbouring experts, T rows of one expert, I inputs,
O outputs.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.functional import grouped_mm

from megatron_lancet.model.linear import Defer, DeferredColumnParallelLinear, DeferredRowParallelLinear
from megatron_lancet.model.local_experts.adjacent import ALIGNMENT_BYTES, AdjacentTensors, lay_side_by_side
from megatron_lancet.model.local_experts.row_groups import RowGroups
from megatron_lancet.runtime.device import has_grouped_gemm, on_cuda
from megatron_lancet.runtime.weight_grad_store import DeferredWeight

DeferredLinear = DeferredColumnParallelLinear | DeferredRowParallelLinear

Multiply = Callable[[torch.Tensor, Sequence[torch.Tensor], bool], torch.Tensor]
"""Multiplies each expert's rows by its weight [O, I]: [m, O] to [m, I], or, transposed, [m, I] to [m, O]."""


class LinearOfExperts(torch.nn.Module):
    """One linear layer of all local experts, whose dWs are deferred.

    Attributes:
        can_group: whether the weights can be multiplied by grouped GEMMs.
        rows: the rows of each expert in the next forward pass: their numbers in the experts' order, for one GEMM per
            expert, or groups with the last expert's rows first, for grouped GEMMs.
    """

    def __init__(self, linears: Sequence[DeferredLinear]) -> None:
        """
        Args:
            linears: the layer of each local expert; moved side by side where grouped GEMMs can then be used.
        """
        super().__init__()
        self.rows: list[int] | RowGroups = []
        self._linears = tuple(linears)
        self._weights, self._main_grads = AdjacentTensors(), AdjacentTensors()
        weights = [linear.weight for linear in linears]
        self.can_group = all(map(_can_group, weights))
        if self.can_group:
            lay_side_by_side(weights)

    def forward(self, input: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Maps [m, I] to [m, O]; there is no bias."""
        weights, rows = [linear.weight for linear in self._linears], self.rows
        multiply: Multiply
        deferrals = [linear.deferral() for linear in self._linears]
        if isinstance(rows, RowGroups):
            multiply = functools.partial(multiply_together, rows, self._weights)
            if self._linears[0].store.part is None:
                defer = functools.partial(self._defer_together, rows)
            else:  # the rows of an expert's other parts do not lie next to these
                defer = functools.partial(_defer_one_by_one, deferrals[::-1], rows.sizes)
        else:
            multiply = functools.partial(multiply_one_by_one, rows)
            defer = functools.partial(_defer_one_by_one, deferrals, rows)
        return _LinearWithDeferredWeightGrads.apply(input, multiply, defer, *weights), None

    def _defer_together(self, rows: RowGroups, grad_mO: torch.Tensor, input_mI: torch.Tensor) -> None:
        linear = self._linears[0]
        if linear.gradient_accumulation_fusion:  # the fused kernel takes one weight
            _defer_one_by_one([one._defer for one in self._linears[::-1]], rows.sizes, grad_mO, input_mI)
            return
        deferred = [linear.deferred for linear in self._linears]
        weights = [weight for weight in deferred if weight is not None]
        assert len(weights) == len(deferred)
        sum_first = linear.has_several_uses and not linear.accumulate_in_gemm

        def compute() -> None:
            self._add_products(weights, rows, grad_mO, input_mI, sum_first)

        grad_mO, input_mI = grad_mO.contiguous(), input_mI.contiguous()
        # One task with the names of all experts' dWs. Traces and profiles call it by the first expert's.
        linear.store.put(weights, compute, num_bytes=grad_mO.nbytes + input_mI.nbytes)

    def _add_products(
        self,
        weights: Sequence[DeferredWeight],
        rows: RowGroups,
        grad_mO: torch.Tensor,
        input_mI: torch.Tensor,
        sum_first: bool,
    ) -> None:
        """Computes the dWs of all experts and adds them to the main gradients.

        Args:
            weights: in the experts' order.
            sum_first: see :meth:`DeferredWeight.add_to_main_grad`.
        """
        last_first = iter(reversed(weights))
        runs = self._main_grads.runs([weight.main_grad for weight in weights])
        for main_grads_jOI, group in zip(runs, rows.of([len(run) for run in runs]), strict=True):
            own = list(itertools.islice(last_first, len(main_grads_jOI)))
            grad_rO, input_rI = grad_mO[group.rows], input_mI[group.rows]
            if not grad_rO.numel():
                continue
            dws_jOI = grouped_mm(grad_rO.t(), input_rI, offs=group.ends)
            if not sum_first:
                main_grads_jOI.add_(dws_jOI)
                continue
            for weight, dw_OI in zip(own, dws_jOI, strict=True):
                weight.add_to_main_grad(dw_OI, sum_first=True)


class _LinearWithDeferredWeightGrads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input_mI: torch.Tensor, multiply: Multiply, defer: Defer, *weights_OI: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(input_mI, *weights_OI)
        ctx.multiply, ctx.defer = multiply, defer
        return multiply(input_mI, weights_OI, True)

    @staticmethod
    def backward(ctx: Any, grad_mO: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input_mI, *weights_OI = ctx.saved_tensors
        grad_mI = ctx.multiply(grad_mO, weights_OI, False)
        ctx.defer(grad_mO, input_mI)
        return grad_mI, None, None, *(None for _ in weights_OI)


def _can_group(weight: torch.Tensor) -> bool:
    """Whether a grouped GEMM takes this weight: the device has the kernel, and rows and address are aligned."""
    aligned = (weight.data_ptr(), *(size * weight.element_size() for size in weight.shape))
    return on_cuda(weight) and has_grouped_gemm(weight) and not any(bytes_ % ALIGNMENT_BYTES for bytes_ in aligned)


def multiply_one_by_one(
    sizes: Sequence[int], rows_mX: torch.Tensor, weights_OI: Sequence[torch.Tensor], transposed: bool
) -> torch.Tensor:
    """See :data:`Multiply`; the rows of each expert are a GEMM that reads and writes its part of the whole.

    Args:
        sizes: rows of each expert.
    """
    factors_XY = [weight.t() for weight in weights_OI] if transposed else weights_OI
    products_mY = rows_mX.new_empty(rows_mX.size(0), factors_XY[0].size(1))
    # ``Tensor.split`` is Python around this, and costs the host as much again.
    rows, products = rows_mX.split_with_sizes(sizes), products_mY.split_with_sizes(sizes)
    for rows_TX, factor_XY, product_TY in zip(rows, factors_XY, products, strict=True):
        torch.mm(rows_TX, factor_XY, out=product_TY)
    return products_mY


def multiply_together(
    rows: RowGroups,
    adjacent: AdjacentTensors,
    rows_mX: torch.Tensor,
    weights_OI: Sequence[torch.Tensor],
    transposed: bool,
) -> torch.Tensor:
    """See :data:`Multiply`; one GEMM for all experts whose weights lie at equal distances."""
    products = []
    runs = adjacent.runs(weights_OI)
    for weights_jOI, group in zip(runs, rows.of([len(run) for run in runs]), strict=True):
        factors_jXY = weights_jOI.transpose(1, 2) if transposed else weights_jOI
        rows_rX = rows_mX[group.rows]
        if rows_rX.size(0):
            products.append(grouped_mm(rows_rX.contiguous(), factors_jXY, offs=group.ends))
    if not products:
        return rows_mX.new_empty(0, weights_OI[0].size(0 if transposed else 1))
    return products[0] if len(products) == 1 else torch.cat(products)


def _defer_one_by_one(
    deferrals: Sequence[Defer], sizes: Sequence[int], grad_mO: torch.Tensor, input_mI: torch.Tensor
) -> None:
    for defer, grad_TO, input_TI in zip(
        deferrals, grad_mO.split_with_sizes(sizes), input_mI.split_with_sizes(sizes), strict=True
    ):
        defer(grad_TO, input_TI)
