"""The ops of a transformer layer on one chunk, without its experts (``moe_layer.py``).

Legend of shapes: s positions, b samples of the chunk, H hidden size.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.typed_torch import apply_module
from megatron.core.utils import make_viewless_tensor

from megatron_lancet.errors import UsageError
from megatron_lancet.model import moe_layer
from megatron_lancet.model.attention.switchable import SwitchableAttention, at_positions
from megatron_lancet.model.chunking import Chunk
from megatron_lancet.model.ops import ChunkState, traced
from megatron_lancet.model.overlapping_moe import ForwardOp, OverlappingMoE
from megatron_lancet.model.recompute import (
    NOTHING,
    DroppedOutputs,
    Recompute,
    maybe_recomputed,
    outputs_dropped_in_stock,
)
from megatron_lancet.model.te.precision import op_precision
from megatron_lancet.registry import model_parts
from megatron_lancet.runtime.comm import Comm
from megatron_lancet.schedule import turns
from megatron_lancet.schedule.dispatch import PLAIN
from megatron_lancet.schedule.layers import LayerKind
from megatron_lancet.schedule.ops import OpKind
from megatron_lancet.schedule.plan import Dispatch, Segment
from megatron_lancet.schedule.turns import AddResidual, Compute, Instruction, Verb


@dataclass(frozen=True)
class OverlappingLayer:
    """A layer that Megatron built, prepared for chunks.

    Attributes:
        number: Megatron's global layer number, from 1. Multi-token predictions count on from the model's last layer.
        stock: the layer.
        kind: the parts that it has.
        moe: its experts; None where it has none.
        attention: its self-attention's kernel; None where it has no attention.
        comm: all-to-alls of the model.
        recompute: which of its ops are recomputed in the backward pass.
        prediction: the multi-token prediction that it belongs to; None in the decoder.
        wiring: see :func:`~megatron_lancet.schedule.turns.program`.
    """

    number: int
    stock: TransformerLayer
    kind: LayerKind
    moe: OverlappingMoE | None
    attention: SwitchableAttention | None
    comm: Comm
    recompute: Recompute = NOTHING
    prediction: MultiTokenPredictionLayer | None = None
    wiring: str = ""

    def numbered(self, number: int) -> "OverlappingLayer":
        """The same layer under another number."""
        return replace(self, number=number, moe=None if self.moe is None else replace(self.moe, number=number))

    def verbs(self, segment: Segment, dispatch: Dispatch) -> turns.Layer:
        """The verbs of a chunk in this layer, in order.

        Args:
            segment: the segment of the plan to which the layer belongs.
            dispatch: what all-to-alls carry.
        """
        has_shared_experts = self.moe is not None and self.moe.stock.use_shared_expert
        pads_to_capacity = self.stock.config.moe_pad_expert_input_to_capacity
        sent, num_chunks = segment.in_tiles(dispatch), segment.num_chunks
        verbs = turns.verbs_of(self.kind, has_shared_experts, pads_to_capacity, num_chunks, sent)
        return verbs if self.prediction is None else turns.mtp_layer(verbs)


type LayerOps = Mapping[Verb, Callable[[OverlappingLayer, ChunkState], None]]
"""Runs each verb of a layer on a chunk."""


class _OnExperts:
    """An op of experts, as an op of their layer."""

    def __init__(self, op: ForwardOp) -> None:
        self.op = op

    def __call__(self, layer: OverlappingLayer, x: ChunkState) -> None:
        assert layer.moe is not None
        self.op(layer.moe, x)


def ops_of(segment: Segment, dispatch: Dispatch) -> LayerOps:
    """The ops of the layers of a segment.

    Args:
        dispatch: what all-to-alls carry.
    """
    of_layers, of_experts = OPS, moe_layer.OPS
    for part in model_parts():
        of_layers = {**of_layers, **part.layer_ops()}
        of_experts = {**of_experts, **part.ops(segment, dispatch, of_experts)}
    return {**of_layers, **{verb: _OnExperts(op) for verb, op in of_experts.items()}}


def check_ops(segment: Segment, dispatch: Dispatch, layers: Sequence[OverlappingLayer]) -> None:
    """
    Raises:
        UsageError: the layers, or this installation, can't run a segment with a dispatch.
    """
    sent = segment.in_tiles(dispatch)
    is_known = set(sent.order(turns.EXPERTS_LAYER)) <= ops_of(segment, dispatch).keys()
    if not is_known or any(dispatch not in layer.moe.dispatchers for layer in layers if layer.moe is not None):
        raise UsageError(
            f"this model can't run a plan with dispatch={sent}: it was built without connections for it, or this "
            "installation of Megatron-Lancet lacks its folder of features/. Install the whole package, or use a plan "
            f"with dispatch={PLAIN} and without tiles."
        )


class BoundOp:
    """An instruction of a layer, with the function that runs it.

    Finds the function once, so that the host looks no verb up while a chunk runs.

    Attributes:
        chunk: index of the chunk that it is for.
    """

    def __init__(self, ops: LayerOps, layer: OverlappingLayer, instruction: Instruction) -> None:
        self.chunk = instruction.chunk
        self._instruction = instruction
        self._comm = layer.comm
        op = ops[instruction.verb]
        if isinstance(op, _OnExperts):
            assert layer.moe is not None
            self._op: Callable[[ChunkState], None] = partial(op.op, layer.moe)
        else:
            self._op = partial(op, layer)

    def run(self, x: ChunkState) -> None:
        """Run the instruction on its chunk."""
        trace = self._comm.trace
        if trace is None and not x.has_output:
            self._op(x)
            return
        with traced(trace, self._instruction, x):
            if x.passes_through(self._instruction.verb):
                x.pass_through(self._comm, self._instruction)
            else:
                self._op(x)


def attention(layer: OverlappingLayer, x: ChunkState) -> None:
    """Norm, self-attention and residual; in a layer with experts also the norm in front of the router."""
    recompute, stock = layer.recompute, layer.stock
    if layer.moe is not None and recompute.attention:
        x.hidden_sbH, x.normed_sbH = maybe_recomputed(True, _attend_and_norm, stock, x.hidden_sbH, x.chunk)
        return
    with outputs_dropped_in_stock(recompute.drops_outputs):
        x.hidden_sbH = maybe_recomputed(recompute.attention, _attend, stock, x.hidden_sbH, x.chunk)
    if layer.moe is not None:
        _norm_or_drop(layer, x)


def norm(layer: OverlappingLayer, x: ChunkState) -> None:
    """The norm in front of the router and the experts, in a layer without attention."""
    if layer.recompute.attention:
        x.normed_sbH = maybe_recomputed(True, _norm, layer.stock, x.hidden_sbH)
    else:
        _norm_or_drop(layer, x)


def mlp(layer: OverlappingLayer, x: ChunkState) -> None:
    """Norm, MLP and residual of a layer without experts."""
    with outputs_dropped_in_stock(layer.recompute.drops_outputs):
        x.hidden_sbH = maybe_recomputed(layer.recompute.mlp, _forward_mlp, layer.stock, x.hidden_sbH)


def add_residual(layer: OverlappingLayer, x: ChunkState) -> None:
    """Add the residual to the experts' output."""
    stock = layer.stock
    residual_sbH = x.hidden_sbH.float() if stock.config.fp32_residual_connection else x.hidden_sbH
    with stock.bias_dropout_add_exec_handler():
        add = stock.mlp_bda(stock.training, stock.config.bias_dropout_fusion)
        hidden_sbH = add((x.output_sbH, None), residual_sbH, stock.hidden_dropout)
    x.hidden_sbH = make_viewless_tensor(inp=hidden_sbH, requires_grad=hidden_sbH.requires_grad, keep_graph=True)
    del x.output_sbH


OPS: LayerOps = {
    Compute(OpKind.ATTENTION): attention,
    Compute(OpKind.NORM): norm,
    Compute(OpKind.MLP): mlp,
    AddResidual(OpKind.POSTPROCESS): add_residual,
}


def _attend(layer: TransformerLayer, hidden_sbH: torch.Tensor, chunk: Chunk) -> torch.Tensor:
    """Norm, self-attention and residual, [s, b, H]."""
    with at_positions(layer.self_attention, chunk), op_precision(layer):
        hidden_sbH, _ = layer._forward_attention(
            hidden_states=hidden_sbH,
            attention_mask=chunk.attention_mask,
            rotary_pos_emb=chunk.rotary_pos_emb,
            attention_bias=chunk.attention_bias,
        )
    return hidden_sbH


def _forward_mlp(layer: TransformerLayer, hidden_sbH: torch.Tensor) -> torch.Tensor:
    """Norm, MLP and residual, [s, b, H]."""
    with op_precision(layer):
        return layer._forward_mlp(hidden_sbH)


def _attend_and_norm(
    layer: TransformerLayer, hidden_sbH: torch.Tensor, chunk: Chunk
) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states after attention, and normed, both [s, b, H]."""
    hidden_sbH = _attend(layer, hidden_sbH, chunk)
    return hidden_sbH, _norm(layer, hidden_sbH)


def _norm_or_drop(layer: OverlappingLayer, x: ChunkState) -> None:
    """The norm in front of the router and the experts, whose output may be dropped."""
    if layer.recompute.experts_norm:
        x.norm = DroppedOutputs()
        x.normed_sbH = x.norm.run(partial(_norm, layer.stock), x.hidden_sbH)
    else:
        x.normed_sbH = _norm(layer.stock, x.hidden_sbH)


def _norm(layer: TransformerLayer, hidden_sbH: torch.Tensor) -> torch.Tensor:
    """Input of the router and the experts, [s, b, H]."""
    normed_sbH: torch.Tensor = apply_module(layer.pre_mlp_layernorm)(hidden_sbH)
    return normed_sbH
