"""Linear layers whose backward computes the input gradient at once and defers the weight gradient.

Legend of shapes: T tokens (S * B, or rows of an expert), I inputs, O outputs of this rank's part of the layer.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import layers
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.utils import prepare_input_tensors_for_wgrad_compute

from megatron_lancet.model.adopt import ByPlan, adopt
from megatron_lancet.runtime.device import on_cuda
from megatron_lancet.runtime.factors import Factors, PartOfRows
from megatron_lancet.runtime.weight_grad_store import DeferredWeight, WeightGradStore

Defer = Callable[[torch.Tensor, torch.Tensor], None]
"""Takes output gradients and inputs, the factors of a dW, which is computed later."""

_MIN_ROWS = 16
"""A CPU multiplies few rows by other kernels than many, which sum in another order. With zeros behind them, up to so
many, the rows of a part have the bits that they have among all rows, as long as sums have some hundred summands."""


class _LinearWithDeferredWeightGrad(torch.autograd.Function):
    """``input @ weight.T + bias`` like Megatron's own, except that dW goes to the store.

    Under sequence parallelism the input is one rank's part of the sequence, in both directions: forward gathers it;
    backward gathers it again, at once, because the collective can't wait with the dW, and scatters the gradient's sum.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        defer: Defer,
        sequence_group: dist.ProcessGroup | None,
        min_rows: int,
    ) -> torch.Tensor:
        ctx.min_rows = min_rows
        ctx.save_for_backward(input, weight)
        ctx.defer = defer
        ctx.has_bias = bias is not None
        ctx.sequence_group = sequence_group
        if sequence_group is not None:
            input, gathering = _start_gather(input, sequence_group)
            gathering.wait()
        output = _product(input, weight.t(), min_rows)
        return output if bias is None else output + bias

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        group = ctx.sequence_group
        if group is not None:
            input, gathering = _start_gather(input, group)
        grad_input = _product(grad_output, weight, ctx.min_rows)
        if group is not None:
            gathering.wait()
            grad_input, scattering = _start_scatter(grad_input, group)
        grad_TO, input_TI = prepare_input_tensors_for_wgrad_compute(grad_output, input)
        ctx.defer(grad_TO, input_TI)
        grad_bias = grad_TO.sum(dim=0) if ctx.has_bias else None
        if group is not None:
            scattering.wait()
        return grad_input, None, grad_bias, None, None, None


def _product(rows: torch.Tensor, factor: torch.Tensor, min_rows: int) -> torch.Tensor:
    """``rows @ factor``, of rows [T, X] with zeros behind them where there are any, but fewer than ``min_rows``."""
    num_rows = rows.size(0)
    if not 0 < num_rows < min_rows:
        return rows.matmul(factor)
    return torch.nn.functional.pad(rows, (0, 0, 0, min_rows - num_rows)).matmul(factor)[:num_rows].clone()


def _start_gather(part: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, dist.Work]:
    """Launches the all-gather along the first dimension."""
    whole = part.new_empty((part.size(0) * group.size(), *part.shape[1:]))
    return whole, dist.all_gather_into_tensor(whole, part.contiguous(), group=group, async_op=True)


def _start_scatter(whole: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, dist.Work]:
    """Launches the reduce-scatter along the first dimension."""
    part = whole.new_empty((whole.size(0) // group.size(), *whole.shape[1:]))
    return part, dist.reduce_scatter_tensor(part, whole.contiguous(), group=group, async_op=True)


def _accumulate_fused(grad_TO: torch.Tensor, input_TI: torch.Tensor, main_grad_OI: torch.Tensor) -> None:
    """Adds dW to the gradient inside the GEMM by apex's kernel, as ``--gradient-accumulation-fusion`` asks."""
    kernels = layers.fused_weight_gradient_mlp_cuda  # Megatron refuses the flag without it
    in_fp32 = main_grad_OI.dtype is torch.float32
    accumulate = kernels.wgrad_gemm_accum_fp32 if in_fp32 else kernels.wgrad_gemm_accum_fp16
    accumulate(input_TI.contiguous(), grad_TO.contiguous(), main_grad_OI)  # the kernel ignores strides


class LinearByPlan(ByPlan):
    """Mixin for a linear module whose dW goes to the store of a plan, and which runs once for each chunk.

    Attributes:
        package: the distribution whose kernels it runs; None for torch's.
        has_several_uses: whether the module runs more than once in a micro-batch, also without chunks.
    """

    package: str | None = None
    has_several_uses: bool = False

    @property
    def trains_weight(self) -> bool:
        """Whether the module has a weight that is trained, and so a dW."""
        raise NotImplementedError

    def begin_deferring(self, name: str, store: WeightGradStore) -> None:
        """Marks the weights for DDP, which then calls ``register_wgrad_accumulation_and_reduce_hooks``.

        Args:
            name: name of the weight gradient's op.
        """
        raise NotImplementedError


class _DeferredWeightGrad(LinearByPlan):
    """Mixin for a Megatron linear layer, whose forward uses the function above.

    It follows DDP's protocol for late gradients: DDP does not watch ``weight``, because the weight carries
    ``skip_backward_post_hook``, but hands this module the function that reports it ready. Until DDP has done so (no
    wrapper, or evaluation) the layer behaves like stock.
    """

    weight: torch.nn.Parameter
    gradient_accumulation_fusion: bool
    store: WeightGradStore
    weight_name: str
    deferred: DeferredWeight | None = None
    accumulate_in_gemm: bool = False
    """See :class:`DeferredWeight`. May change between steps."""

    @property
    def trains_weight(self) -> bool:
        """Whether the weight is trained."""
        return self.weight.requires_grad

    def keep_stocks_order(self, keeps: bool) -> None:
        """See :class:`ByPlan`."""
        self.accumulate_in_gemm = not keeps

    def begin_deferring(self, name: str, store: WeightGradStore) -> None:
        """Marks the weight for DDP, which then calls :meth:`register_wgrad_accumulation_and_reduce_hooks`."""
        self.weight_name = name
        self.store = store
        self.weight.skip_backward_post_hook = True  # type: ignore[attr-defined]

    def register_wgrad_accumulation_and_reduce_hooks(self, report_ready: Callable[[], None]) -> None:
        """DDP calls this for each parameter of the module that is marked as deferred."""
        deferred = self.deferred = DeferredWeight(self.weight, self.weight_name, report_ready)
        # Autograd visits this node after the last use of the weight in a backward pass, though every use returned
        # None: by then all dWs have been put. The node must be kept alive: the hook goes with it.
        use = self.weight.expand_as(self.weight).grad_fn
        assert use is not None
        self._accumulate_grad = use.next_functions[0][0]
        assert self._accumulate_grad is not None
        self._accumulate_grad.register_hook(lambda *_: self.store.mark_last_use(deferred))

    def deferral(self) -> Defer:
        """Receives the factors of the dW of a use that begins now: puts it, or gathers the parts of its rows."""
        part = self.store.part
        return self._defer if part is None else partial(self._gather, part)

    def _gather(self, part: PartOfRows, grad_TO: torch.Tensor, input_TI: torch.Tensor) -> None:
        whole = part.add(self, Factors(grad_TO, input_TI))
        if whole is not None:
            self._put(whole.joined, whole.num_bytes)

    def _defer(self, grad_TO: torch.Tensor, input_TI: torch.Tensor) -> None:
        factors = Factors(grad_TO, input_TI)
        self._put(lambda: factors, factors.num_bytes)

    def _put(self, factors: Callable[[], Factors], num_bytes: int) -> None:
        deferred, in_gemm, is_fused = self.deferred, self.accumulate_in_gemm, self.gradient_accumulation_fusion
        sum_first = self.has_several_uses and not in_gemm
        assert deferred is not None

        def compute() -> None:
            grad_TO, input_TI = factors()
            if is_fused:
                _accumulate_fused(grad_TO, input_TI, deferred.main_grad)
            else:
                deferred.add_product(grad_TO, input_TI, in_gemm, sum_first)

        self.store.put([deferred], compute, num_bytes)

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        defers = self.deferred is not None and torch.is_grad_enabled() and weight is self.weight
        if defers and not trains_unwatched(weight):  # changed since then; the report adds autograd's dW, if any
            defers = kwargs["gradient_accumulation_fusion"] = False
        if not defers:
            return super()._forward_impl(input, weight, *args, **kwargs)  # type: ignore[misc]
        group = kwargs["tp_group"] if kwargs["sequence_parallel"] else None
        is_exact_part = self.store.part is not None and not self.accumulate_in_gemm and not on_cuda(weight)
        min_rows = _MIN_ROWS if is_exact_part else 0
        return _LinearWithDeferredWeightGrad.apply(input, weight, kwargs.get("bias"), self.deferral(), group, min_rows)


class DeferredColumnParallelLinear(_DeferredWeightGrad, ColumnParallelLinear):
    """Megatron's column-parallel linear layer with deferred dW."""


class DeferredRowParallelLinear(_DeferredWeightGrad, RowParallelLinear):
    """Megatron's row-parallel linear layer with deferred dW."""


def trains_unwatched(weight: torch.Tensor) -> bool:
    """Whether a weight is trained now and has no gradient hook: autograd calls hooks, and computes no deferred dW."""
    return weight.requires_grad and not (weight._backward_hooks or weight._post_accumulate_grad_hooks)


def can_defer(module: torch.nn.Module) -> bool:
    """Whether a linear layer's dW can be deferred: it is trained, has its own weight, and no hook waits for the dW."""
    if type(module) not in (ColumnParallelLinear, RowParallelLinear):
        return False
    linear, weight = cast(Any, module), cast(Any, module).weight
    if weight is None or not trains_unwatched(weight) or getattr(linear, "gtp_remat_size", 1) > 1:
        return False
    # Tensor parallelism without sequence parallelism sums the input's gradient inside; Megatron trains no MoE so.
    return bool(linear.explicit_expert_comm) or not getattr(linear, "allreduce_dgrad", False)


def defer_weight_grad(module: torch.nn.Module, name: str, store: WeightGradStore) -> None:
    """Makes a linear layer put its dW into ``store``. Call before DDP wraps the model.

    Args:
        name: name of the weight gradient's op.
    """
    own: Any = DeferredColumnParallelLinear if isinstance(module, ColumnParallelLinear) else DeferredRowParallelLinear
    adopt(module, own).begin_deferring(name, store)
