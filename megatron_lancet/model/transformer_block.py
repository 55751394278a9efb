"""The stack of layers, which runs the program of each of the plan's segments."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.typed_torch import apply_module
from megatron.core.utils import make_viewless_tensor

from megatron_lancet.errors import UsageError
from megatron_lancet.model.adopt import refuse_bypassed_hooks
from megatron_lancet.model.attention.masks import MaskLimit, look_once
from megatron_lancet.model.attention.switchable import at_positions
from megatron_lancet.model.chunking import (
    Chunk,
    Rotary,
    make_chunks,
    merge_hidden,
    split_hidden,
    split_rows,
    unchunked_micro_batch,
)
from megatron_lancet.model.ops import ChunkState, begin_cut, begin_layers, end_cut, end_layers
from megatron_lancet.model.routing.padding import padding_for_stock, padding_of
from megatron_lancet.model.routing.router import ChunkedTopKRouter
from megatron_lancet.model.samples import DocumentReader, Documents, PackedMicroBatch
from megatron_lancet.model.te.precision import block_precision
from megatron_lancet.model.transformer_layer import BoundOp, LayerOps, OverlappingLayer, ops_of
from megatron_lancet.runtime.comm import Comm
from megatron_lancet.runtime.recorder import Recorder
from megatron_lancet.runtime.transport.base import ReadyEvent
from megatron_lancet.schedule.ops import Op
from megatron_lancet.schedule.plan import OverlapRange, Plan, Segment
from megatron_lancet.schedule.turns import Concatenate, Cut, Instruction, Program, Wait, program


@dataclass(frozen=True)
class SegmentForward:
    """The forward pass of a plan's segment, as far as its layers are in this block.

    Attributes:
        layers: the segment's layers in this block, by number.
        program: what runs in them, in order.
        ops: runs each verb of the program.
    """

    segment: Segment
    layers: Mapping[int, OverlappingLayer]
    program: Program
    ops: LayerOps

    @property
    def num_waits(self) -> int:
        """Number of messages that the program waits for."""
        return sum(isinstance(one, Instruction) and isinstance(one.verb, Wait) for one in self.program)

    def run(self, micro_batch: ChunkState, trace: Recorder | None) -> None:
        """Run the program on a micro-batch.

        Args:
            micro_batch: holds the input of the first instruction, and afterwards the output of the last one.
            trace: None where nothing is recorded.
        """
        chunks = [micro_batch]
        for one in self._bound:
            match one:
                case BoundOp():
                    one.run(chunks[one.chunk])
                case Cut():
                    chunks = cut(micro_batch, self.segment, trace)
                case Concatenate():
                    concatenate(chunks, micro_batch, self.segment, trace)
                    chunks = [micro_batch]

    @cached_property
    def _bound(self) -> Sequence[BoundOp | Cut | Concatenate]:
        """The program with what runs each instruction."""
        return [
            BoundOp(self.ops, self.layers[one.layer], one) if isinstance(one, Instruction) else one
            for one in self.program
        ]


class LayersByPlan:
    """A stack of layers that Megatron built; in training it runs by a plan.

    Attributes:
        layers: the layers, as Megatron built them.
        config: Megatron's configuration.
        pre_process: whether the input comes from the embedding, not from another pipeline stage.
        post_process: whether the model's head comes next.
        input_tensor: the input from the previous pipeline stage.
        comm: all-to-alls of the model.
        overlapping_layers: its layers, prepared for chunks.
        uses_sdpa_everywhere: whether the fused attention kernel runs also where a plan doesn't need it.
        segments: the plan's segments that have layers in this block, in order.
        end_segments: the same for micro-batches at the ends of a step with pairing.
        following: the op after its last layer; None where that is on the next stage.
        overlaps_evaluation: whether forward passes without gradients also run by the plan.
        has_random_state: whether stock's layers have a random state of their own under sequence parallelism.
        documents: reads packed documents, for which all attentions are prepared; None where there are none.
        checked_limits: mask limits checked before.
    """

    checked_limits: Set[MaskLimit] = frozenset()
    overlaps_evaluation: bool = False
    has_random_state: bool = True
    documents: DocumentReader | None = None
    layers: torch.nn.ModuleList
    config: TransformerConfig
    pre_process: bool
    post_process: bool
    input_tensor: torch.Tensor
    set_input_tensor: Callable[[torch.Tensor], None]
    comm: Comm
    overlapping_layers: Sequence[OverlappingLayer]
    uses_sdpa_everywhere: bool
    segments: Sequence[SegmentForward]
    end_segments: Sequence[SegmentForward]
    following: Op | None

    def run_by(self, plan: Plan) -> None:
        """Runs ``plan`` from the next micro-batch on."""
        self.segments = segments_here(plan.in_middle, self.overlapping_layers)
        self.end_segments = segments_here(plan.at_ends, self.overlapping_layers)

    def num_waits(self, at_end: bool) -> int:
        """Number of messages that the forward of a micro-batch waits for; see :attr:`end_segments`."""
        return sum(segment.num_waits for segment in (self.end_segments if at_end else self.segments))

    def run_layers(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        rotary_pos_emb: Rotary | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        padding_mask: torch.Tensor | None = None,
        **others: Any,
    ) -> torch.Tensor:
        """Run all layers, up to the final norm.

        Args:
            hidden_states: [S, B, H], ignored where a previous pipeline stage sends the input. With packed documents
                also [B * S, 1, H], sample after sample.
            attention_mask: [B or 1, 1, S, S] or None, True where attention is not allowed.
            packed_seq_params: the documents of packed samples; None where a sample is one.
            padding_mask: [B, S] or None, True for padding tokens.
            others: other inputs of Megatron's forward pass, which must be None.

        Returns:
            The output of the last layer, of the input's shape.

        Raises:
            UsageError: an input can't be cut into chunks, or the layers don't support a mask or documents, or these
                don't fit the input.
        """
        refuse_arguments(others)
        hidden = hidden_states if self.pre_process else self.input_tensor
        hidden = make_viewless_tensor(inp=hidden, requires_grad=True, keep_graph=True)
        packed = self.packed(packed_seq_params, hidden, attention_mask)
        segments = self.end_segments if self.comm.progress.is_at_end else self.segments
        in_layers = [(one.segment, layer.stock) for one in segments for layer in one.layers.values()]
        self.checked_limits = look_once(attention_mask, self.checked_limits, in_layers, hidden.size(0))
        self._begin_micro_batch(None if packed is None else packed.documents)
        trace = self.comm.trace
        if trace is not None:
            hidden = begin_layers(trace, hidden, self.pre_process)
        hidden_SBH = hidden if packed is None else packed.unflattened(hidden)
        padding = padding_of(padding_mask, hidden_SBH, packed)
        unchunked = unchunked_micro_batch(attention_mask, rotary_pos_emb, attention_bias, packed, padding)
        micro_batch = ChunkState(unchunked)
        micro_batch.hidden_sbH = hidden_SBH
        del hidden_SBH
        with random_state(self.config) if self.has_random_state else nullcontext(), block_precision(self.config):
            for segment in segments:
                segment.run(micro_batch, trace)
        hidden = micro_batch.hidden_sbH if packed is None else packed.flattened(micro_batch.hidden_sbH)
        return end_layers(trace, hidden, self.following)

    def run_stock(
        self,
        forward: Callable[..., torch.Tensor],
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        rotary_pos_emb: Rotary | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        padding_mask: torch.Tensor | None = None,
        **others: Any,
    ) -> torch.Tensor:
        """Runs Megatron's own forward pass, with attention that keeps to the documents.

        Args:
            forward: takes the other arguments but ``packed_seq_params``; see :meth:`run_layers`.
        """
        hidden = hidden_states if self.pre_process else self.input_tensor
        packed = self.packed(packed_seq_params, hidden, attention_mask)
        if packed is None:
            others = {"rotary_pos_emb": rotary_pos_emb, "padding_mask": padding_mask, **others}
            return forward(hidden_states, attention_mask, **others)
        chunk = unchunked_micro_batch(rotary_pos_emb=rotary_pos_emb, packed=packed)
        unflattened = packed.unflattened(hidden)
        padding = padding_for_stock(padding_mask, unflattened, packed)
        others = {"rotary_pos_emb": chunk.rotary_pos_emb, "padding_mask": padding, **others}
        if not self.pre_process:
            self.set_input_tensor(unflattened)
        with document_masks(chunk, self.layers):
            return packed.flattened(forward(unflattened, None, **others))

    def packed(
        self, params: PackedSeqParams | None, hidden: torch.Tensor, attention_mask: torch.Tensor | None
    ) -> PackedMicroBatch | None:
        """The documents of a micro-batch; None where a sample is one.

        Raises:
            UsageError: see :meth:`run_layers`.
        """
        if params is None:
            return None
        if self.documents is None:
            raise UsageError(
                "the overlapping layers got packed_seq_params, and their attentions are not prepared for documents. "
                "Pass --dataloader-inter-document-masking or Overlap(packed_samples=True), or --lancet-plan off."
            )
        if attention_mask is not None:
            raise UsageError(
                "the overlapping layers got packed_seq_params and an attention mask. Drop --reset-attention-mask: "
                "attention stays inside documents without it."
            )
        return self.documents.read(params, hidden, self.config)

    def _begin_micro_batch(self, documents: Documents | None) -> None:
        if self.comm.store is not None and not self.comm.progress.is_on:
            self.comm.store.assert_idle()
        for layer in self.layers:
            begin_layer(layer, documents)


def random_state(config: TransformerConfig) -> AbstractContextManager[None]:
    """Random state of the layers' dropout: under sequence parallelism each rank has positions of its own."""
    return get_cuda_rng_tracker().fork() if config.sequence_parallel else nullcontext()


def begin_layer(layer: torch.nn.Module, documents: Documents | None) -> None:
    """Prepares a layer for the chunks of the next micro-batch.

    Args:
        documents: the documents of the micro-batch; None where a sample is one.

    Raises:
        UsageError: the layer has a hook that would not run.
    """
    refuse_bypassed_hooks(layer)
    router = getattr(layer.mlp, "router", None)
    if isinstance(router, ChunkedTopKRouter):
        router.begin_micro_batch(documents)


@contextmanager
def document_masks(documents: Chunk, layers: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Inside, the attentions of layers that Megatron's own forward pass runs attend inside documents.

    Args:
        documents: the full micro-batch, with its documents.
    """
    with ExitStack() as stack:
        for layer in layers:
            if isinstance(layer.self_attention, Attention):
                stack.enter_context(at_positions(layer.self_attention, documents))
        yield


def refuse_arguments(arguments: Mapping[str, Any]) -> None:
    """
    Raises:
        UsageError: an argument that can't be cut into chunks is given.
    """
    given = sorted(name for name, value in arguments.items() if value is not None)
    if given:
        raise UsageError(
            f"the overlapping layers got {', '.join(given)}, which they can't cut into chunks yet. "
            "Run with --lancet-plan off."
        )


class OverlappingTransformerBlock(LayersByPlan, TransformerBlock):
    """Megatron's transformer block; in training its micro-batches go through by a plan."""

    def forward(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None, **inputs: Any) -> torch.Tensor:
        """Run all layers and the final norm; see :meth:`LayersByPlan.run_layers`."""
        is_training = self.training and torch.is_grad_enabled()
        if not is_training and not self.overlaps_evaluation:
            return self.run_stock(super().forward, hidden_states, attention_mask, **inputs)
        hidden = self.run_layers(hidden_states, attention_mask, **inputs)
        if self.final_layernorm is not None:
            hidden = apply_module(self.final_layernorm)(hidden)
            hidden = make_viewless_tensor(inp=hidden, requires_grad=True, keep_graph=True)
        elif not self.pre_process and not len(self.layers):
            hidden = hidden.clone()  # as stock: Megatron frees a sent output, which here would be the input
        return hidden


def segments_here(plan: Plan, layers: Sequence[OverlappingLayer]) -> Sequence[SegmentForward]:
    """The plan's segments that have any of ``layers``, in order.

    Args:
        layers: layers of a pipeline stage; each has its number in the full model.
    """
    segments = []
    for segment in plan.segments:
        own = {layer.number: layer for layer in layers if segment.has_layer(layer.number)}
        if own:
            verbs = [(number, layer.verbs(segment, plan.dispatch)) for number, layer in own.items()]
            instructions = program(verbs, segment.num_chunks, segment.range, layers[0].wiring)
            segments.append(SegmentForward(segment, own, instructions, ops_of(segment, plan.dispatch)))
    return segments


def cut(micro_batch: ChunkState, segment: Segment, trace: Recorder | None) -> list[ChunkState]:
    """Splits the input of the first op in chunks: hidden states, or the input of the router or of the experts.

    Args:
        trace: None where nothing is recorded.
    """
    chunks = (_cut_hidden if segment.range.has_attention else _cut_normed)(micro_batch, segment, trace)
    end_cut(trace)
    return chunks


def _cut_hidden(micro_batch: ChunkState, segment: Segment, trace: Recorder | None) -> list[ChunkState]:
    unchunked = micro_batch.chunk
    parts_sbH = split_hidden(begin_cut(trace, micro_batch.hidden_sbH), segment, unchunked.documents)
    del micro_batch.hidden_sbH
    chunks = make_chunks(parts_sbH, segment, unchunked)
    states = [ChunkState(chunk) for chunk in chunks]
    for x, hidden_sbH in zip(states, parts_sbH, strict=True):
        x.hidden_sbH = hidden_sbH
    return states


def _cut_normed(micro_batch: ChunkState, segment: Segment, trace: Recorder | None) -> list[ChunkState]:
    routing = []
    if segment.range is OverlapRange.EXPERTS:
        shape = micro_batch.normed_sbH.shape
        routing = [split_rows(rows, shape, segment) for rows in (micro_batch.probs_tE, micro_batch.routing_map_tE)]
        del micro_batch.probs_tE, micro_batch.routing_map_tE, micro_batch.routed
        routed = ReadyEvent(routing[1][0])
    has_shared_experts = micro_batch.shared_input_sbH is not None  # the router of the full micro-batch has run
    parts_sbH, norm = micro_batch.norm.then(split_hidden, begin_cut(trace, micro_batch.normed_sbH), segment)
    del micro_batch.normed_sbH
    micro_batch.shared_input_sbH = None
    unchunked = Chunk(0, 1, padding_mask=micro_batch.chunk.padding_mask)
    states = [ChunkState(chunk) for chunk in make_chunks(parts_sbH, segment, unchunked)]
    for index, (x, part_sbH) in enumerate(zip(states, parts_sbH, strict=True)):
        x.normed_sbH, x.norm = part_sbH, norm
        if has_shared_experts:
            x.shared_input_sbH = part_sbH
        if routing:
            x.probs_tE, x.routing_map_tE = (parts_tE[index] for parts_tE in routing)
            x.routed = routed
    return states


def concatenate(
    chunks: Sequence[ChunkState], micro_batch: ChunkState, segment: Segment, trace: Recorder | None
) -> None:
    """Concatenates the output of the last op in chunks: hidden states, or the experts' output.

    Args:
        trace: None where nothing is recorded.
    """
    has_residual = segment.range.has_attention
    parts = [x.hidden_sbH if has_residual else x.output_sbH for x in chunks]
    # The last chunk's backward begins first, right after the micro-batch's gradient was split.
    parts[-1] = begin_cut(trace, parts[-1])
    if has_residual:
        micro_batch.hidden_sbH = merge_hidden(parts, segment)
    else:
        micro_batch.output_sbH = merge_hidden(parts, segment)
    end_cut(trace)
