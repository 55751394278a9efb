"""The captured blocks of a pipeline stage, and which of them a micro-batch takes.

Each micro-batch in flight has a *slot*, a set of blocks with a memory pool of its own. Inside of a slot forwards run in
the order of layers and backwards in reverse, whatever runs between them; so graphs of a slot may reuse each other's
memory in the order of their capture, and graphs of two slots share none.
"""

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from megatron_lancet.features.cuda_graphs.block import CapturedBlock, Inputs, Pool, SharedBuffers, Source
from megatron_lancet.model.chunking import Chunk, Rotary
from megatron_lancet.model.ops import ChunkState
from megatron_lancet.model.transformer_block import LayersByPlan, SegmentForward
from megatron_lancet.model.transformer_layer import LayerOps, OverlappingLayer
from megatron_lancet.runtime.transport.base import ReadyEvent
from megatron_lancet.schedule.ops import OpKind
from megatron_lancet.schedule.turns import Compute

ATTENTION, ROUTE = Compute(OpKind.ATTENTION), Compute(OpKind.ROUTE)


class StageGraphs:
    """Runs attention and routing of a stage's layers, eagerly before :meth:`capture` and by replays behind it.

    Attributes:
        num_replayed: micro-batches that were replayed.
        num_eager: micro-batches that ran eagerly although their plan is captured: of another size, or beyond the number
            in flight that earlier steps have had.
    """

    def __init__(self, block: LayersByPlan) -> None:
        """Puts its ops into the segments of the plan in use.

        Args:
            block: the stage's layers.
        """
        self.num_replayed = self.num_eager = 0
        self._layers: dict[int, tuple[OverlappingLayer, LayerOps]] = {}
        self._in_flight: set[int] = set()
        self._num_slots = 0
        self._slots: list[Mapping[int, CapturedBlock]] = []
        self._present: Mapping[int, CapturedBlock] | None = None
        self._like: Inputs | None = None
        block.segments = list(self._with_own_ops(block.segments))
        block.end_segments = list(self._with_own_ops(block.end_segments))
        self._block, self._installed = block, block.segments

    @property
    def is_installed(self) -> bool:
        """Whether the stage still runs the plan that it ran when this object was made."""
        return self._block.segments is self._installed

    @property
    def num_graphs(self) -> int:
        """Graphs that were captured."""
        return 2 * sum(map(len, self._slots))

    def _with_own_ops(self, segments: Sequence[SegmentForward]) -> Iterator[SegmentForward]:
        whole = [one for one in segments if one.segment.num_chunks == 1]
        captured = {n: (layer, one.ops) for one in whole for n, layer in one.layers.items() if _has_block(layer)}
        self._layers |= captured
        for one in segments:
            if captured.keys().isdisjoint(one.layers):
                yield one
            else:
                run = partial(self._attention, one.ops, min(captured))
                yield replace(one, ops={**one.ops, ATTENTION: run, ROUTE: partial(self._route, one.ops)})

    def begin_step(self) -> None:
        """Call between steps: no micro-batch is in flight, also if the last step has failed."""
        self._in_flight.clear()

    def capture(self) -> None:
        """Captures the blocks of as many micro-batches as were in flight so far. Call between steps."""
        if self._like is None:  # no micro-batch could be captured
            return
        stream, buffers = torch.cuda.Stream(), SharedBuffers()
        for _ in range(self._num_slots):
            pool = Pool(torch.cuda.graph_pool_handle(), stream)
            blocks = {
                number: CapturedBlock(_source(*self._layers[number]), pool, buffers) for number in sorted(self._layers)
            }
            for block in blocks.values():
                block.capture_forward(self._like)
            for block in reversed(blocks.values()):
                block.capture_backward()
            self._slots.append(blocks)

    def _attention(self, eager: LayerOps, first: int, layer: OverlappingLayer, x: ChunkState) -> None:
        if not _has_block(layer):
            eager[ATTENTION](layer, x)
            return
        if layer.number == first:
            self._begin_micro_batch(x)
        if self._present is None:
            eager[ATTENTION](layer, x)
        else:
            self._present[layer.number](x)

    def _route(self, eager: LayerOps, layer: OverlappingLayer, x: ChunkState) -> None:
        if self._present is None or not _has_block(layer):
            eager[ROUTE](layer, x)
        else:
            x.routed = ReadyEvent(x.routing_map_tE)

    def _begin_micro_batch(self, x: ChunkState) -> None:
        """Gives a micro-batch the first slot that is free until its backward has passed this layer."""
        slot = next(n for n in range(len(self._in_flight) + 1) if n not in self._in_flight)
        self._in_flight.add(slot)
        x.hidden_sbH = _AtBackward.apply(x.hidden_sbH, partial(self._in_flight.discard, slot))
        if not self._slots:
            self._num_slots = max(self._num_slots, slot + 1)
            if _is_plain(x.chunk):
                self._like = Inputs(x.hidden_sbH.shape, x.hidden_sbH.dtype, x.chunk)
            return
        fits = slot < len(self._slots) and self._is_alike(x)
        self._present = self._slots[slot] if fits else None
        self.num_replayed += fits
        self.num_eager += not fits

    def _is_alike(self, x: ChunkState) -> bool:
        """Whether a micro-batch has the shapes, and the inputs besides its hidden states, that were captured."""
        assert self._like is not None
        hidden_SBH, rotary = x.hidden_sbH, list(_tensors(x.chunk.rotary_pos_emb))
        captured = list(_tensors(self._like.chunk.rotary_pos_emb))
        has_rotary = len(rotary) == len(captured) and all(map(operator.is_, rotary, captured))  # Megatron keeps it
        is_same_size = hidden_SBH.shape == self._like.shape and hidden_SBH.dtype == self._like.dtype
        return _is_plain(x.chunk) and is_same_size and has_rotary


class _AtBackward(torch.autograd.Function):
    """Identity whose backward calls a function."""

    @staticmethod
    def forward(ctx: Any, hidden_SBH: torch.Tensor, call: Any) -> torch.Tensor:
        ctx.call = call
        return hidden_SBH.view_as(hidden_SBH)

    @staticmethod
    def backward(ctx: Any, grad_SBH: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.call()
        return grad_SBH, None


def _has_block(layer: OverlappingLayer) -> bool:
    """Whether a layer has attention and experts, and no embedding of next tokens."""
    return layer.moe is not None and layer.attention is not None and layer.prediction is None


def _source(layer: OverlappingLayer, ops: LayerOps) -> Source:
    stock = layer.stock

    def run(x: ChunkState) -> None:
        ops[ATTENTION](layer, x)
        ops[ROUTE](layer, x)

    parts = stock.input_layernorm, stock.self_attention, stock.pre_mlp_layernorm, stock.mlp.router
    modules = [
        module
        for part in parts
        for module in part.modules()
        if next(module.parameters(recurse=False), None) is not None
    ]
    assert layer.comm.store is not None, "a run with graphs has a store"
    return Source(run, modules, layer.comm.store)


def _is_plain(chunk: Chunk) -> bool:
    """Whether a micro-batch has no inputs but its hidden states and a rotary embedding."""
    others = chunk.attention_mask, chunk.attention_bias, chunk.documents, chunk.padding_mask
    return all(other is None for other in others)


def _tensors(rotary: Rotary | None) -> Iterator[torch.Tensor]:
    if isinstance(rotary, torch.Tensor):
        yield rotary
    for part in rotary if isinstance(rotary, tuple) else ():
        yield from _tensors(part)
