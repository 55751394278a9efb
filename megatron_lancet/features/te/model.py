"""The modules of Transformer Engine in a model."""

from typing import Any

import torch

from megatron_lancet.features.te import attention, linear
from megatron_lancet.model.parts import ModelPart


class _TransformerEngine(ModelPart):
    def adopt_modules(self, model: Any) -> None:
        """Makes the linear modules ready to be called once per chunk."""
        for module in list(model.modules()):
            if linear.is_te_linear(module):
                linear.call_per_chunk(module)

    def adopt_attention(self, core: torch.nn.Module) -> None:
        """Makes the core attention ready to see earlier chunks."""
        if attention.is_te_attention(core):
            attention.call_per_chunk(core)

    def needs_dense_rows(self, experts: torch.nn.Module) -> bool:
        """Transformer Engine ignores strides, or makes rows contiguous."""
        return linear.has_te_linear(experts)


TRANSFORMER_ENGINE = _TransformerEngine()
