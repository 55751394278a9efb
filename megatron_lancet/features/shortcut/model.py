"""MoE layers whose routed sum is added one layer later, in the overlapping block and in Megatron's own modules."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import MoETransformerLayer, TransformerLayer
from megatron.core.utils import make_viewless_tensor

from megatron_lancet.errors import UsageError
from megatron_lancet.features.shortcut.identity import (
    ChunkedRouterToItself,
    add_identity_experts,
    has_identity_experts,
    postprocess,
    route,
)
from megatron_lancet.features.shortcut.order import ADD_SHARED, NAME
from megatron_lancet.features.shortcut.support import layers_blocker, plan_blocker
from megatron_lancet.model.adopt import adopt, unknown_class
from megatron_lancet.model.gpt import kind_of
from megatron_lancet.model.ops import ChunkState
from megatron_lancet.model.overlapping_moe import ForwardOps
from megatron_lancet.model.parts import ModelPart
from megatron_lancet.model.transformer_layer import LayerOps, OverlappingLayer, add_residual
from megatron_lancet.schedule.ops import Compute, OpKind
from megatron_lancet.schedule.plan import Dispatch, Plan, Segment


class _Shortcut(ModelPart):
    def layer_ops(self) -> LayerOps:
        """The sum that no longer waits for the routed experts."""
        return OPS

    def ops(self, segment: Segment, dispatch: Dispatch, ops: ForwardOps) -> ForwardOps:
        """The ops of identity experts, where a layer has some."""
        return {_ROUTE: partial(route, ops[_ROUTE]), _POSTPROCESS: partial(postprocess, ops[_POSTPROCESS])}

    def check_plan(self, plan: Plan, model: Any, max_expert_rows: int | None) -> None:
        """Refuses a plan that parts a MoE layer from its dense layer."""
        if any(layer.wiring == NAME for layer in model.decoder.overlapping_layers):
            check_plan(plan)


def check_plan(plan: Plan) -> None:
    """
    Raises:
        UsageError: layers in pairs can't run the plan.
    """
    blocker = plan_blocker(plan)
    if blocker is not None:
        raise UsageError(
            f"--lancet-shortcut-moe can't run the plan {plan}: {blocker}. Use one segment with range=stack and without "
            "tiles."
        )


def add_shared(layer: OverlappingLayer, x: ChunkState) -> None:
    """Add the output of the shared experts to the residual."""
    assert x.shared_sbH is not None, "refused before the model was built"
    x.output_sbH, x.shared_sbH = x.shared_sbH, None
    add_residual(layer, x)


OPS: LayerOps = {ADD_SHARED: add_shared}
_ROUTE, _POSTPROCESS = Compute(OpKind.ROUTE), Compute(OpKind.POSTPROCESS)


class TwoSumsMoE(MoELayer):
    """Megatron's MoE layer; it returns the sums of shared and of routed experts side by side, [s, b, 2H]."""

    _own_sbH: torch.Tensor | None = None
    """Input of identity experts, then their output; other methods of a forward pass run in between."""

    def shared_experts_compute(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Runs first in Megatron's forward pass; the overlapping block's training calls it in an op of its own."""
        is_op = isinstance(self.router, ChunkedRouterToItself) and self.training and torch.is_grad_enabled()
        keeps = has_identity_experts(self) and not is_op
        self._own_sbH = hidden_states.view_as(hidden_states) if keeps else None
        return super().shared_experts_compute(hidden_states)

    def route(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Routes tokens; identity experts have done their part then."""
        routed = super().route(*args, **kwargs)
        self._own_sbH = None if self._own_sbH is None else self.router.take_own(self._own_sbH)
        return routed

    def postprocess(self, output: torch.Tensor, shared_expert_output: torch.Tensor | None) -> torch.Tensor:
        """Returns both sums."""
        assert shared_expert_output is not None, "refused before the model was built"
        routed = super().postprocess(output, None)
        if self._own_sbH is not None:
            routed, self._own_sbH = routed + self._own_sbH, None
        return torch.cat((shared_expert_output, routed), dim=-1)


class _GivesRoutedSum(TransformerLayer):
    def _forward_post_mlp(
        self, mlp_output_with_bias: tuple[torch.Tensor, torch.Tensor | None], residual: torch.Tensor
    ) -> torch.Tensor:
        """Adds the residual to the shared experts' sum; returns it beside the routed sum, [s, b, 2H].

        One tensor: Megatron's recompute of a range of layers takes and returns one.
        """
        both, bias = mlp_output_with_bias
        shared, routed = both.chunk(2, dim=-1)
        hidden = super()._forward_post_mlp((shared.contiguous(), bias), residual)
        return torch.cat((hidden, routed), dim=-1)


class GivingLayer(_GivesRoutedSum, TransformerLayer):
    """Megatron's layer with experts, which leaves the routed sum to the next one."""


class GivingMoELayer(_GivesRoutedSum, MoETransformerLayer):
    """The same for Megatron's class of layers with experts."""


class TakingLayer(TransformerLayer):
    """Megatron's dense layer; it adds the routed sum of the layer before it, behind its own MLP."""

    def forward(self, hidden_states: torch.Tensor, **inputs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        Args:
            hidden_states: both outputs of the layer before it, [s, b, 2H].
        """
        hidden, routed = (part.contiguous() for part in hidden_states.chunk(2, dim=-1))
        hidden, context = super().forward(hidden_states=hidden, **inputs)
        with self.bias_dropout_add_exec_handler():
            add = self.mlp_bda(self.training, self.config.bias_dropout_fusion)
            hidden = add((routed, None), hidden, self.hidden_dropout)
        return make_viewless_tensor(inp=hidden, requires_grad=hidden.requires_grad, keep_graph=True), context


_GIVING = {TransformerLayer: GivingLayer, MoETransformerLayer: GivingMoELayer}


def wire(stages: Sequence[Any], num_identity_experts: int = 0) -> None:
    """Makes Megatron's own forward pass of a model add routed sums one layer later, in place.

    The overlapping block runs the layers op by op in training, and by this forward pass in evaluation.

    Args:
        stages: this rank's pipeline stages.
        num_identity_experts: further experts of each router, see ``identity.py``.

    Raises:
        UsageError: a stage does not have whole pairs of layers.
    """
    for stage in stages:
        layers = stage.decoder.layers
        blocker = layers_blocker([kind_of(layer) for layer in layers])
        if blocker is not None:
            raise UsageError(
                f"--lancet-shortcut-moe: {blocker} on a pipeline stage. Give each stage whole pairs of layers."
            )
        for layer in layers[::2]:
            if type(layer) not in _GIVING:
                raise unknown_class(TransformerLayer, layer)
            adopt(layer, _GIVING[type(layer)])
            if num_identity_experts:
                add_identity_experts(layer.mlp, num_identity_experts)
            adopt(layer.mlp, TwoSumsMoE)
        for layer in layers[1::2]:
            adopt(layer, TakingLayer)


SHORTCUT = _Shortcut()
