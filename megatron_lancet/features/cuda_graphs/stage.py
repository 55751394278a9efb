"""The captured blocks of a pipeline stage, and their assignment to micro-batches.

Each micro-batch in flight has a *slot*, a set of blocks with a memory pool of its own. Inside of a slot forwards run in
the order of the plan and backwards in reverse, whatever runs between them; so graphs of a slot may reuse each other's
memory in the order of their capture, and graphs of two slots share none.
"""

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from megatron_lancet.errors import UsageError
from megatron_lancet.features.cuda_graphs.block import CapturedBlock, Inputs, Pool, SharedBuffers, Source
from megatron_lancet.model.chunking import Chunk, Rotary
from megatron_lancet.model.ops import ChunkState
from megatron_lancet.model.transformer_block import LayersByPlan, SegmentForward
from megatron_lancet.model.transformer_layer import LayerOps, OverlappingLayer
from megatron_lancet.runtime.transport.base import ReadyEvent
from megatron_lancet.schedule.ops import OpKind
from megatron_lancet.schedule.plan import ChunkDim, Segment
from megatron_lancet.schedule.turns import Compute

ATTENTION, ROUTE = Compute(OpKind.ATTENTION), Compute(OpKind.ROUTE)

type Blocks = Mapping[tuple[int, int], CapturedBlock]
"""By number of the layer, and index of the chunk."""


def is_captured(segment: Segment) -> bool:
    """Whether attention and routing of a segment's layers can be captured: attention sees whole sequences."""
    cuts_samples = segment.chunk_dim is ChunkDim.BATCH and segment.range.has_attention
    return segment.num_chunks == 1 or cuts_samples


@dataclass(frozen=True)
class ForwardPath:
    """The captured layers of a forward: in the middle of a step, or at its ends.

    Attributes:
        num_chunks: pairs of a layer number and the layer's number of chunks, in order.
    """

    num_chunks: tuple[tuple[int, int], ...]

    @property
    def first(self) -> int:
        """Number of the first captured layer."""
        return self.num_chunks[0][0]

    def places(self) -> Iterator[tuple[int, int, int]]:
        """Yields layer, number of chunks and index of a chunk, in the order of forwards."""
        for layer, num_chunks in self.num_chunks:
            for index in range(num_chunks):
                yield layer, num_chunks, index


class StageGraphs:
    """Runs attention and routing of a stage's layers: eagerly before :meth:`capture`, by replays after it.

    Attributes:
        num_replayed: micro-batches that were replayed.
        num_eager: micro-batches that ran eagerly after the capture, because their size differed, or because more were
            in flight than in the warm-up steps.
    """

    def __init__(self, block: LayersByPlan) -> None:
        """Puts its ops into the segments of the plan in use.

        Args:
            block: the stage's layers.
        """
        self.num_replayed = self.num_eager = 0
        self._layers: dict[int, tuple[OverlappingLayer, LayerOps]] = {}
        self._paths: set[ForwardPath] = set()
        self._like: dict[tuple[int, int], Inputs] = {}
        """By number of chunks, and index of the chunk."""
        self._in_flight: set[int] = set()
        self._num_slots = 0
        self._sources: dict[int, Source] = {}
        """By layer, once they are captured."""
        self._slots: list[Mapping[ForwardPath, Blocks]] = []
        self._present: Blocks | None = None
        self._logits: dict[int, list[torch.Tensor]] = {}
        """Of the chunks so far of the present micro-batch, by layer."""
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
        return 2 * sum(len(blocks) for slot in self._slots for blocks in slot.values())

    def _with_own_ops(self, segments: Sequence[SegmentForward]) -> Iterator[SegmentForward]:
        num_chunks = {}
        for one in filter(lambda one: is_captured(one.segment), segments):
            for number, layer in one.layers.items():
                if _has_block(layer):
                    num_chunks[number] = one.segment.num_chunks
                    self._layers[number] = layer, one.ops
        path = ForwardPath(tuple(sorted(num_chunks.items())))
        for one in segments:
            if num_chunks.keys().isdisjoint(one.layers):
                yield one
            else:
                run = partial(self._attention, one.ops, path)
                yield replace(one, ops={**one.ops, ATTENTION: run, ROUTE: partial(self._route, one.ops)})

    def begin_step(self) -> None:
        """Frees all slots, also after a failed step. Call between steps.

        Raises:
            UsageError: a captured weight was frozen or got a gradient hook.
        """
        self._in_flight.clear()
        for source in self._sources.values():
            source.check_weights()

    def capture(self) -> None:
        """Captures the blocks of each slot that the warm-up steps have used. Call between steps.

        Raises:
            UsageError: the model can't be captured.
        """
        stream, buffers = torch.cuda.Stream(), SharedBuffers()
        sources = self._sources = {number: _source(*of_layer) for number, of_layer in self._layers.items()}
        for source in sources.values():
            source.check_weights()
        _check_stream_of_ddp(sources.values())
        for layer, num_chunks, index in (place for path in self._paths for place in path.places()):
            sources[layer].warm_up_thread(self._like[num_chunks, index])
        for _ in range(self._num_slots):
            pool = Pool(torch.cuda.graph_pool_handle(), stream)
            self._slots.append({path: self._captured(path, sources, pool, buffers) for path in self._paths})

    def _captured(self, path: ForwardPath, sources: Mapping[int, Source], pool: Pool, buffers: SharedBuffers) -> Blocks:
        blocks: dict[tuple[int, int], CapturedBlock] = {}
        for layer, num_chunks, index in path.places():
            block = blocks[layer, index] = CapturedBlock(sources[layer], pool, buffers)
            is_last = index == num_chunks - 1
            earlier = [blocks[layer, one].logits for one in range(index)] if is_last else []
            block.capture_forward(self._like[num_chunks, index], earlier)
        for block in reversed(blocks.values()):
            block.capture_backward()
        return blocks

    def _attention(self, eager: LayerOps, path: ForwardPath, layer: OverlappingLayer, x: ChunkState) -> None:
        if not _has_block(layer):
            eager[ATTENTION](layer, x)
            return
        if layer.number == path.first and x.chunk.index == 0:
            self._begin_micro_batch(path, x)
        if self._present is None:
            if not self._slots and _is_plain(x.chunk):
                like = Inputs(x.hidden_sbH.shape, x.hidden_sbH.dtype, x.chunk)
                self._like[x.chunk.num_chunks, x.chunk.index] = like
            eager[ATTENTION](layer, x)
            return
        earlier = self._logits.pop(layer.number, []) if x.chunk.is_last else []
        logits = self._present[layer.number, x.chunk.index](x, earlier)
        if logits is not None:
            self._logits.setdefault(layer.number, []).append(logits)

    def _route(self, eager: LayerOps, layer: OverlappingLayer, x: ChunkState) -> None:
        if self._present is None or not _has_block(layer):
            eager[ROUTE](layer, x)
        else:
            x.routed = ReadyEvent(x.routing_map_tE)

    def _begin_micro_batch(self, path: ForwardPath, x: ChunkState) -> None:
        """Assigns the first free slot. The backward of this layer's first chunk frees it."""
        slot = next(n for n in range(len(self._in_flight) + 1) if n not in self._in_flight)
        self._in_flight.add(slot)
        if not x.hidden_sbH.requires_grad:  # a frozen embedding, without whose gradient the slot would not be freed
            x.hidden_sbH = x.hidden_sbH.detach().requires_grad_()
        x.hidden_sbH = _AtBackward.apply(x.hidden_sbH, partial(self._in_flight.discard, slot))
        self._logits.clear()
        if not self._slots:
            if _is_plain(x.chunk):
                self._num_slots = max(self._num_slots, slot + 1)
                self._paths.add(path)
            return
        fits = slot < len(self._slots) and path in self._slots[slot] and self._is_alike(x)
        self._present = self._slots[slot][path] if fits else None
        self.num_replayed += fits
        self.num_eager += not fits

    def _is_alike(self, x: ChunkState) -> bool:
        """Whether a chunk has the captured shape, dtype and rotary embedding, and no other input."""
        like = self._like[x.chunk.num_chunks, x.chunk.index]
        rotary, captured = (list(_tensors(chunk.rotary_pos_emb)) for chunk in (x.chunk, like.chunk))
        has_rotary = len(rotary) == len(captured) and all(map(operator.is_, rotary, captured))  # Megatron keeps it
        is_same_size = x.hidden_sbH.shape == like.shape and x.hidden_sbH.dtype == like.dtype
        return _is_plain(x.chunk) and is_same_size and has_rotary


class _AtBackward(torch.autograd.Function):
    """Identity whose backward calls a function."""

    @staticmethod
    def forward(ctx: Any, hidden_sbH: torch.Tensor, call: Any) -> torch.Tensor:
        ctx.call = call
        return hidden_sbH.view_as(hidden_sbH)

    @staticmethod
    def backward(ctx: Any, grad_sbH: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.call()
        return grad_sbH, None


def _has_block(layer: OverlappingLayer) -> bool:
    """Whether a layer has attention and experts, and no embedding of next tokens."""
    return layer.moe is not None and layer.attention is not None and layer.prediction is None


def _source(layer: OverlappingLayer, ops: LayerOps) -> Source:
    stock, router = layer.stock, layer.stock.mlp.router

    def run(x: ChunkState, earlier: Sequence[torch.Tensor]) -> torch.Tensor | None:
        router.earlier = [(logits, None) for logits in earlier]
        ops[ATTENTION](layer, x)
        ops[ROUTE](layer, x)
        kept, router.earlier = router.earlier, []
        return kept[-1][0] if kept else None

    def warm_up(x: ChunkState) -> None:
        router.earlier = []
        ops[ATTENTION](layer, x)
        with torch.no_grad():  # so the router neither counts tokens nor logs losses
            ops[ROUTE](layer, x)
        router.earlier = []

    parts = stock.input_layernorm, stock.self_attention, stock.pre_mlp_layernorm, router
    modules = [module for part in parts for module in part.modules()]
    assert layer.comm.store is not None, "a run with graphs has a store"
    return Source(run, warm_up, modules, layer.comm.store)


def _check_stream_of_ddp(sources: Iterable[Source]) -> None:
    """
    Raises:
        UsageError: DDP's accumulation nodes are on the default stream, for which a capture can't wait.
    """
    default = torch.cuda.default_stream()
    if any(weight.ddp_stream == default for source in sources for weight in source.deferred):
        raise UsageError(
            "CUDA graphs can't be captured: the model was wrapped in DDP on CUDA's default stream. Wrap it on another "
            "stream, as Megatron's training loop does: with torch.cuda.stream(torch.cuda.Stream()). Or drop "
            "--lancet-cuda-graphs."
        )


def _is_plain(chunk: Chunk) -> bool:
    """Whether a chunk has no inputs but its hidden states and a rotary embedding."""
    others = chunk.attention_mask, chunk.attention_bias, chunk.documents, chunk.padding_mask
    return all(other is None for other in others)


def _tensors(rotary: Rotary | None) -> Iterator[torch.Tensor]:
    if isinstance(rotary, torch.Tensor):
        yield rotary
    for part in rotary if isinstance(rotary, tuple) else ():
        yield from _tensors(part)
