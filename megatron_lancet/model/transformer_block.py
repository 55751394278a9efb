"""The transformer block that drives its chunks through the layers, one while another's rows are on the wire."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.typed_torch import apply_module
from megatron.core.utils import make_viewless_tensor

from megatron_lancet.errors import UsageError
from megatron_lancet.model.chunking import Chunk, make_chunks, merge_hidden, split_hidden, split_rows
from megatron_lancet.model.hooks import refuse_bypassed_hooks
from megatron_lancet.model.moe_layer import OverlappingMoE, Steps, moe_steps, routed_steps
from megatron_lancet.model.router import ChunkedTopKRouter
from megatron_lancet.model.traced_ends import begin_cut, begin_layers, end_cut, end_layers
from megatron_lancet.model.transformer_layer import OverlappingLayer, layer_around_experts, layer_steps
from megatron_lancet.runtime.comm import Comm
from megatron_lancet.runtime.trace import Trace, enter, leave
from megatron_lancet.schedule.ops import OpKind
from megatron_lancet.schedule.plan import OverlapRange, Plan, Segment


class OverlappingTransformerBlock(TransformerBlock):
    """Megatron's transformer block; in training its micro-batches go through in chunks.

    Attributes:
        comm: all-to-alls of the model.
        overlapping_layers: its layers, prepared for chunks.
        uses_sdpa_everywhere: whether the fused attention kernel runs also where a plan doesn't need it.
        segments: the plan's segments, as far as their layers are in this block, with these layers.
    """

    comm: Comm
    overlapping_layers: Sequence[OverlappingLayer]
    uses_sdpa_everywhere: bool
    segments: Sequence[tuple[Segment, Sequence[OverlappingLayer]]]

    def run_by(self, plan: Plan) -> None:
        """From the next micro-batch on, run by ``plan``."""
        self.segments = segments_here(plan, self.overlapping_layers)

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
        trace = self.comm.trace
        if trace is not None:
            hidden = begin_layers(trace, hidden, self.pre_process)
        with self._random_state():
            for segment, layers in self.segments:
                hidden = run_segment(segment, layers, hidden, attention_mask, rotary_pos_emb, attention_bias)
        if trace is not None:
            hidden = end_layers(trace, hidden, self.post_process)
        if self.final_layernorm is not None:
            hidden = apply_module(self.final_layernorm)(hidden)
            hidden = make_viewless_tensor(inp=hidden, requires_grad=True, keep_graph=True)
        return hidden

    def _random_state(self) -> AbstractContextManager[None]:
        """Where the layers' dropout draws from: under sequence parallelism each rank has its own positions."""
        if self.config.sequence_parallel:
            return get_cuda_rng_tracker().fork()
        return nullcontext()

    def _begin_micro_batch(self) -> None:
        if self.comm.store is not None:
            self.comm.store.assert_idle()
        for layer in self.layers:
            refuse_bypassed_hooks(layer)
            router = getattr(layer.mlp, "router", None)
            if isinstance(router, ChunkedTopKRouter):
                router.begin_micro_batch()

    @staticmethod
    def _refuse(kwargs: dict[str, Any]) -> None:
        given = sorted(name for name, value in kwargs.items() if value is not None)
        if given:
            raise UsageError(
                f"the overlapping transformer block got {', '.join(given)}, which it can't cut into chunks yet. "
                "Run with --lancet-plan off."
            )


def segments_here(
    plan: Plan, layers: Sequence[OverlappingLayer]
) -> Sequence[tuple[Segment, Sequence[OverlappingLayer]]]:
    """The plan's segments that have any of ``layers``, in order, each with those of them that are its own.

    Args:
        layers: of a pipeline stage; they know their number in the whole model.
    """
    owned = [
        (segment, [layer for layer in layers if segment.has_layer(layer.stock.layer_number)])
        for segment in plan.segments
    ]
    return [(segment, own) for segment, own in owned if own]


def run_segment(
    segment: Segment,
    layers: Sequence[OverlappingLayer],
    hidden: torch.Tensor,
    *attention_inputs: torch.Tensor | None,
) -> torch.Tensor:
    """Layers that run in the same way, in chunks where the segment's range has it; [S, B, H] to [S, B, H].

    Args:
        attention_inputs: mask, rotary embedding and bias of the micro-batch, see :class:`Chunk`.
    """
    if segment.range is OverlapRange.STACK:
        return _in_chunks(segment, layers[0].comm.trace, partial(_layers_steps, layers), hidden, *attention_inputs)
    for layer in layers:
        if segment.range is OverlapRange.LAYER:
            hidden = _in_chunks(segment, layer.comm.trace, partial(layer_steps, layer), hidden, *attention_inputs)
        else:
            whole = Chunk(0, 1, 0, 0, None, *attention_inputs)
            hidden = layer_around_experts(layer, hidden, whole, partial(run_experts, segment))
    return hidden


def run_experts(segment: Segment, moe: OverlappingMoE, normed: torch.Tensor) -> torch.Tensor:
    """From the router or from dispatch on in chunks; [S, B, H] to [S, B, H]."""
    if segment.range is OverlapRange.GATE:
        return _in_chunks(segment, moe.comm.trace, partial(moe_steps, moe), normed)
    trace, number = moe.comm.trace, moe.stock.layer_number
    normed = enter(trace, normed, number, 0, OpKind.ROUTE)
    routing = moe.stock.router(normed)
    leave(trace, number, 0, OpKind.ROUTE)
    probs, routing_map = (split_rows(rows, normed.shape, segment) for rows in routing)

    def steps(part: torch.Tensor, chunk: Chunk) -> Steps:
        return routed_steps(moe, part, probs[chunk.index], routing_map[chunk.index], chunk)

    return _in_chunks(segment, trace, steps, normed)


def _layers_steps(layers: Sequence[OverlappingLayer], hidden: torch.Tensor, chunk: Chunk) -> Steps:
    for layer in layers:
        hidden = yield from layer_steps(layer, hidden, chunk)
    return hidden


def _in_chunks(
    segment: Segment,
    trace: Trace | None,
    steps: Callable[[torch.Tensor, Chunk], Steps],
    hidden: torch.Tensor,
    *attention_inputs: torch.Tensor | None,
) -> torch.Tensor:
    """Cut, let the chunks take turns, put together."""
    trace = trace if segment.num_chunks > 1 else None
    hidden = begin_cut(trace, hidden)
    parts = split_hidden(hidden, segment)
    chunks = make_chunks(parts, segment, *attention_inputs)
    end_cut(trace)
    outputs = _take_turns(segment, [steps(part, chunk) for part, chunk in zip(parts, chunks, strict=True)])
    # Of the chunks' ways back the last one's begins first: right after the micro-batch's gradient was cut.
    outputs[-1] = begin_cut(trace, outputs[-1])
    merged = merge_hidden(outputs, segment)
    end_cut(trace)
    return merged


def _take_turns(segment: Segment, chunks: Sequence[Steps]) -> list[torch.Tensor]:
    """Resume the chunks in the segment's order until all have returned."""
    outputs: dict[int, torch.Tensor] = {}
    for index in segment.turns():
        if len(outputs) == len(chunks):
            break
        try:
            next(chunks[index])
        except StopIteration as finished:
            outputs[index] = finished.value
    return [outputs[index] for index in range(len(chunks))]
