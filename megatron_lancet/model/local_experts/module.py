"""Runs the experts of a rank one after the other as Megatron does, or layer by layer.

Megatron's own grouped experts need Transformer Engine; with the local spec ``--moe-grouped-gemm`` builds sequential
experts, and calling one costs more than its arithmetic where it has few rows. Layer by layer, what lies between the
linear layers runs once for all experts. On a CPU each expert is then one GEMM that reads and writes its rows of the
whole; with many rows that is slower than one expert after the other: what one layer wrote has left the cache when the
next one reads it. ``benchmarks/parts/experts.py`` measures it. On CUDA, where sequential experts are a dozen kernels
each, all experts' rows go through one grouped GEMM (``grouped_linear.py``).

Legend of shapes: m rows of all local experts, e local experts, H hidden.
"""

import copy
from functools import cached_property

import torch
from megatron.core.transformer.moe.experts import SequentialMLP

from megatron_lancet.errors import UsageError
from megatron_lancet.model.adopt import ByPlan, is_of_ddp, refuse_hooks
from megatron_lancet.model.linear import trains_unwatched
from megatron_lancet.model.local_experts.grouped_linear import DeferredLinear, LinearOfExperts
from megatron_lancet.model.local_experts.row_groups import RowGroups
from megatron_lancet.runtime.device import on_cuda

MAX_ROWS_PER_EXPERT = 128


def grouped_is_faster(num_experts: int, num_rows: int) -> bool:
    """Whether experts on a CPU run layer by layer faster than one after the other (benchmarks/RESULTS.md).

    Args:
        num_experts: local experts, e.
        num_rows: rows of all local experts, m.
    """
    return num_rows <= num_experts * MAX_ROWS_PER_EXPERT


class GroupingSequentialMLP(ByPlan, SequentialMLP):
    """Megatron's sequential experts; in training they may run layer by layer.

    On a CPU those with few rows do. The GEMMs then give the same bits. Activations may not: which elements of a tensor
    torch computes without vector instructions, and rounds in another way, depends on the tensor's size.

    On CUDA all do, by grouped GEMMs where :attr:`LinearOfExperts.can_group` says so. These do not give the bits of
    stock's GEMMs. Stock's own gradients vary from run to run there unless Megatron's ``deterministic_mode`` is set, and
    with it experts stay sequential.

    Attributes:
        may_group: False keeps the experts on a CPU sequential, to the bit as stock's. May change between steps.
    """

    may_group: bool = True

    def keep_stocks_order(self, keeps: bool) -> None:
        """See :class:`ByPlan`."""
        self.may_group = not keeps

    @property
    def last_expert_first(self) -> bool:
        """Whether the next forward pass expects the last expert's rows first, as the weights lie in memory."""
        made = self._layer_by_layer if self.training and torch.is_grad_enabled() else None
        can_group = made is not None and made.can_group and not self.config.deterministic_mode
        return can_group and self._together() is not None

    def forward(
        self, permuted_local_hidden_states: torch.Tensor, tokens_per_expert: torch.Tensor, permuted_probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Runs the local experts.

        Args:
            permuted_local_hidden_states: [m, H], ordered by expert; see :attr:`last_expert_first`.
            tokens_per_expert: [e] in the experts' order, on the host or on the device.
            permuted_probs: [m].

        Returns:
            Output [m, H]; None, because the bias has been added.
        """
        rows_mH = permuted_local_hidden_states
        together = self._together()
        if together is None or not self._runs_by_layer(rows_mH.size(0)):
            return super().forward(rows_mH, tokens_per_expert, permuted_probs)
        last_first = self.last_expert_first
        rows = RowGroups(tokens_per_expert, rows_mH) if last_first else tokens_per_expert.tolist()
        return together(rows_mH, rows, permuted_probs)

    def _runs_by_layer(self, num_rows: int) -> bool:
        if on_cuda(self.local_experts[0].linear_fc1.weight):
            return not self.config.deterministic_mode
        # Layer by layer, DDP gets gradients in another order. Replicas of an expert must agree, and have unlike rows.
        return self.may_group and self.dp_group.size() == 1 and grouped_is_faster(len(self.local_experts), num_rows)

    def _together(self) -> "_LayerByLayer | None":
        """Returns the local experts as one module; None where this pass can't run so. Refuses hooks on replicas."""
        # Megatron's own passes, as in evaluation, have the first expert's rows first.
        made = self._layer_by_layer if self.training and torch.is_grad_enabled() else None
        watched = [weight for weight in made.weights if not trains_unwatched(weight)] if made is not None else []
        if self.dp_group.size() > 1 and any(weight.requires_grad and on_cuda(weight) for weight in watched):
            raise UsageError(
                "expected no gradient hook on experts that other ranks have too, found one. Register it on all ranks "
                "before the model is prepared, or pass --lancet-plan off."
            )
        return None if watched else made

    @cached_property
    def _layer_by_layer(self) -> "_LayerByLayer | None":
        layers = {
            name: [getattr(expert, name) for expert in self.local_experts] for name in ("linear_fc1", "linear_fc2")
        }
        every = [linear for linears in layers.values() for linear in linears]
        deferred = all(getattr(linear, "deferred", None) is not None and linear.bias is None for linear in every)
        if len(self.local_experts) == 1 or not deferred or self.config.moe_apply_probs_on_input:
            return None
        return _LayerByLayer(list(self.local_experts), layers)


class _LayerByLayer:
    """An expert's own forward with other linear layers: activations and probabilities work row by row.

    Attributes:
        can_group: whether all linear layers can use grouped GEMMs.
        weights: of all linear layers.
    """

    def __init__(self, experts: list[torch.nn.Module], layers: dict[str, list[DeferredLinear]]) -> None:
        """
        Args:
            experts: the local experts.
            layers: their linear layers, by name.
        """
        self._linears = {name: LinearOfExperts(linears) for name, linears in layers.items()}
        self._stock = [linear for expert_linears in zip(*layers.values(), strict=True) for linear in expert_linears]
        self.weights = [linear.weight for linear in self._stock]
        self.can_group = all(linear.can_group for linear in self._linears.values())
        self._forward = copy.copy(experts[0])
        self._forward._modules = {**experts[0]._modules, **self._linears}
        self._parts = [*experts, *self._stock]
        self._hooks = [one for p in self._parts for one in (p._forward_hooks, p._backward_hooks, p._backward_pre_hooks)]

    def __call__(
        self, rows_mH: torch.Tensor, rows: list[int] | RowGroups, probs_m: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Maps rows [m, H] to outputs [m, H].

        Args:
            rows: see :attr:`LinearOfExperts.rows`.

        Raises:
            UsageError: an expert, or a linear layer of one, has a hook.
        """
        pre_hooks = (hook for part in self._parts for hook in part._forward_pre_hooks.values())
        if any(self._hooks) or not all(map(is_of_ddp, pre_hooks)):
            for part in self._parts:
                refuse_hooks(part, "the experts of a rank run together. Register it on mlp.experts")
        self._wait_for_parameters()
        for linear in self._linears.values():
            linear.rows = rows
        return self._forward(rows_mH, probs_m)

    def _wait_for_parameters(self) -> None:
        """Runs the hooks by which DDP waits for gathered parameters (``--overlap-param-gather``), in stock's order."""
        for linear in self._stock:
            for hook in linear._forward_pre_hooks.values():
                if is_of_ddp(hook):
                    hook(linear, ())
