"""The transformer block that drives its chunks through the layers, one while another's rows are on the wire."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.typed_torch import apply_module
from megatron.core.utils import make_viewless_tensor

from megatron_lancet.errors import UsageError
from megatron_lancet.model.chunking import Chunk, make_chunks, merge_hidden, split_hidden, split_rows
from megatron_lancet.model.moe_layer import OverlappingMoE, Steps, moe_steps, routed_steps
from megatron_lancet.model.router import ChunkedTopKRouter
from megatron_lancet.model.transformer_layer import OverlappingLayer, layer_around_experts, layer_steps
from megatron_lancet.runtime.comm import Comm
from megatron_lancet.schedule.plan import OverlapRange, Plan


class OverlappingTransformerBlock(TransformerBlock):
    """Megatron's transformer block; in training its micro-batches go through in chunks.

    Attributes:
        plan: how.
        comm: all-to-alls of the model.
        overlapping_layers: its layers, prepared for chunks.
    """

    plan: Plan
    comm: Comm
    overlapping_layers: Sequence[OverlappingLayer]

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
        hidden = self._run_layers(hidden, attention_mask, rotary_pos_emb, attention_bias)
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

    def _run_layers(self, hidden: torch.Tensor, *attention_inputs: torch.Tensor | None) -> torch.Tensor:
        """All layers, in chunks where the plan's range has it; [S, B, H] to [S, B, H]."""
        if self.plan.range is OverlapRange.STACK:
            return self._in_chunks(partial(self._layers_steps, self.overlapping_layers), hidden, *attention_inputs)
        for layer in self.overlapping_layers:
            if self.plan.range is OverlapRange.LAYER:
                hidden = self._in_chunks(partial(layer_steps, layer), hidden, *attention_inputs)
            else:
                whole = Chunk(0, 1, 0, 0, None, *attention_inputs)
                hidden = layer_around_experts(layer, hidden, whole, self._run_experts)
        return hidden

    @staticmethod
    def _layers_steps(layers: Sequence[OverlappingLayer], hidden: torch.Tensor, chunk: Chunk) -> Steps:
        for layer in layers:
            hidden = yield from layer_steps(layer, hidden, chunk)
        return hidden

    def _run_experts(self, moe: OverlappingMoE, normed: torch.Tensor) -> torch.Tensor:
        """From the router or from dispatch on in chunks; [S, B, H] to [S, B, H]."""
        if self.plan.range is OverlapRange.GATE:
            return self._in_chunks(partial(moe_steps, moe), normed)
        probs, routing_map = (split_rows(rows, normed.shape, self.plan) for rows in moe.stock.router(normed))

        def steps(part: torch.Tensor, chunk: Chunk) -> Steps:
            return routed_steps(moe, part, probs[chunk.index], routing_map[chunk.index], chunk)

        return self._in_chunks(steps, normed)

    def _in_chunks(
        self,
        steps: Callable[[torch.Tensor, Chunk], Steps],
        hidden: torch.Tensor,
        *attention_inputs: torch.Tensor | None,
    ) -> torch.Tensor:
        """Cut, let the chunks take turns, put together."""
        parts = split_hidden(hidden, self.plan)
        chunks = make_chunks(parts, self.plan, *attention_inputs)
        outputs = self._take_turns([steps(part, chunk) for part, chunk in zip(parts, chunks, strict=True)])
        return merge_hidden(outputs, self.plan)

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
