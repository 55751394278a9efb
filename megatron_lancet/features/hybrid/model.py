"""Megatron's stack of layers with one part each: attention, experts or an MLP, as ``--hybrid-layer-pattern`` says."""

from typing import Any

import torch
from megatron.core.models.hybrid.hybrid_block import HybridStack
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.utils import make_viewless_tensor

from megatron_lancet.model.chunking import Rotary
from megatron_lancet.model.parts import ModelPart
from megatron_lancet.model.transformer_block import LayersByPlan


class OverlappingHybridStack(LayersByPlan, HybridStack):
    """Megatron's hybrid stack; in training its micro-batches go through in chunks."""

    has_random_state = False

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        inference_context: Any = None,
        rotary_pos_emb: Rotary | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Run all layers and the final norm; see :meth:`LayersByPlan.run_layers`."""
        if not (self.training and torch.is_grad_enabled()):
            inputs = {"rotary_pos_emb": rotary_pos_emb, "inference_context": inference_context, **kwargs}
            return self.run_stock(super().forward, hidden_states, attention_mask, **inputs)
        hidden = self.run_layers(
            hidden_states, attention_mask, rotary_pos_emb, inference_context=inference_context, **kwargs
        )
        if self.post_process and self.post_layer_norm:
            hidden = self.final_norm(hidden)
        return make_viewless_tensor(inp=hidden, requires_grad=hidden.requires_grad, keep_graph=True)


class _Hybrid(ModelPart):
    def block_class(self, model: Any) -> type[OverlappingHybridStack] | None:
        """The class of the stack of a hybrid model."""
        return OverlappingHybridStack if isinstance(model, HybridModel) else None


HYBRID = _Hybrid()
