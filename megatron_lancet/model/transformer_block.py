"""The transformer block that drives its chunks through the layers, one while another's rows are on the wire."""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.typed_torch import apply_module
from megatron.core.utils import make_viewless_tensor

from megatron_lancet.errors import UsageError
from megatron_lancet.model.chunking import Chunk, merge_hidden, split_hidden, split_mask
from megatron_lancet.model.dispatcher.all_to_all import AllToAllDispatcher
from megatron_lancet.model.moe_layer import Steps
from megatron_lancet.model.router import ChunkedTopKRouter
from megatron_lancet.model.transformer_layer import layer_steps
from megatron_lancet.runtime.all_to_all import Comm
from megatron_lancet.schedule.plan import Plan


class OverlappingTransformerBlock(TransformerBlock):
    """Megatron's transformer block; in training its micro-batches go through in chunks.

    Attributes:
        plan: how.
        comm: all-to-alls of the model.
        dispatchers: one per layer, None where the layer is dense.
    """

    plan: Plan
    comm: Comm
    dispatchers: Sequence[AllToAllDispatcher | None]

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        rotary_pos_emb: torch.Tensor | None = None,
        attention_bias: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Run all layers.

        Args:
            hidden_states: [S, B, H], ignored where a previous pipeline stage sends the input.
            attention_mask: [B or 1, 1, S, S] or None, True where attention is not allowed.

        Raises:
            UsageError: an input that can't be cut into chunks (packed sequences, padding masks, ...).
        """
        if not (self.training and torch.is_grad_enabled()):
            return super().forward(
                hidden_states,
                attention_mask,
                rotary_pos_emb=rotary_pos_emb,
                attention_bias=attention_bias,
                **kwargs,
            )
        self._refuse(kwargs)
        hidden = hidden_states if self.pre_process else self.input_tensor
        hidden = make_viewless_tensor(inp=hidden, requires_grad=True, keep_graph=True)
        self._begin_micro_batch()
        parts = split_hidden(hidden, self.plan)
        masks = split_mask(attention_mask, [part.size(1) for part in parts])
        hidden = merge_hidden(
            self._take_turns(
                [
                    self._chunk_steps(part, Chunk(index, len(parts), masks[index], rotary_pos_emb, attention_bias))
                    for index, part in enumerate(parts)
                ]
            )
        )
        if self.final_layernorm is not None:
            hidden = apply_module(self.final_layernorm)(hidden)
            hidden = make_viewless_tensor(inp=hidden, requires_grad=True, keep_graph=True)
        return hidden

    def _begin_micro_batch(self) -> None:
        if self.comm.store is not None:
            self.comm.store.assert_idle()
        for layer in self.layers:
            router = getattr(layer.mlp, "router", None)
            if isinstance(router, ChunkedTopKRouter):
                router.begin_micro_batch()

    def _chunk_steps(self, hidden: torch.Tensor, chunk: Chunk) -> Steps:
        for layer, dispatcher in zip(self.layers, self.dispatchers, strict=True):
            hidden = yield from layer_steps(layer, dispatcher, hidden, chunk, self.comm)
        return hidden

    def _take_turns(self, chunks: Sequence[Steps]) -> list[torch.Tensor]:
        """Resume the chunks in the plan's order until all have returned."""
        outputs: dict[int, torch.Tensor] = {}
        for index in self.plan.turns():
            if len(outputs) == len(chunks):
                break
            try:
                next(chunks[index])
            except StopIteration as finished:
                outputs[index] = finished.value
        return [outputs[index] for index in range(len(chunks))]

    @staticmethod
    def _refuse(kwargs: dict[str, Any]) -> None:
        given = sorted(name for name, value in kwargs.items() if value is not None)
        if given:
            raise UsageError(
                f"the overlapping transformer block got {', '.join(given)}, which it can't cut into chunks yet. "
                "Run with --lancet-plan off."
            )
