"""The ops of a transformer layer on one chunk, except those of its experts (``moe_layer.py``).

Legend of shapes: s positions, b samples of the chunk, H hidden size.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.typed_torch import apply_module
from megatron.core.utils import make_viewless_tensor

from megatron_lancet.model import moe_layer
from megatron_lancet.model.attention.switchable import SwitchableAttention, at_positions
from megatron_lancet.model.chunking import Chunk
from megatron_lancet.model.moe_layer import OverlappingMoE
from megatron_lancet.model.ops import NOTHING, ChunkState, Recompute, maybe_recomputed, traced
from megatron_lancet.model.te.precision import op_precision
from megatron_lancet.runtime.comm import Comm
from megatron_lancet.schedule import turns
from megatron_lancet.schedule.layers import LayerKind
from megatron_lancet.schedule.ops import OpKind
from megatron_lancet.schedule.turns import AddResidual, Compute, Instruction, Verb


@dataclass(frozen=True)
class OverlappingLayer:
    """A layer that Megatron built, prepared for chunks.

    Attributes:
        stock: the layer.
        kind: the parts that it has.
        moe: its experts; None where it has none.
        attention: its self-attention's kernel; None where it has no attention.
        comm: all-to-alls of the model.
        recompute: which of its ops are recomputed in the backward pass.
    """

    stock: TransformerLayer
    kind: LayerKind
    moe: OverlappingMoE | None
    attention: SwitchableAttention | None
    comm: Comm
    recompute: Recompute = NOTHING

    @property
    def number(self) -> int:
        """Megatron's global layer number, from 1."""
        return self.stock.layer_number

    @property
    def verbs(self) -> turns.Layer:
        """The verbs of a chunk in this layer, in order."""
        return turns.verbs_of(self.kind, self.moe is not None and self.moe.stock.use_shared_expert)


def forward_layer(layer: OverlappingLayer, instruction: Instruction, x: ChunkState) -> None:
    """Run one instruction of a layer on the chunk that it is for."""
    with traced(layer.comm.trace, instruction, x):
        if instruction.verb in FORWARD:
            FORWARD[instruction.verb](layer, x)
        else:
            assert layer.moe is not None
            moe_layer.FORWARD[instruction.verb](layer.moe, x)


def attention(layer: OverlappingLayer, x: ChunkState) -> None:
    """Norm, self-attention and residual; in a layer with experts also the norm in front of the router."""
    if layer.moe is None:
        x.hidden_sbH = maybe_recomputed(layer.recompute.attention, _attend, layer.stock, x.hidden_sbH, x.chunk)
    else:
        x.hidden_sbH, x.normed_sbH = maybe_recomputed(
            layer.recompute.attention, _attend_and_norm, layer.stock, x.hidden_sbH, x.chunk
        )


def norm(layer: OverlappingLayer, x: ChunkState) -> None:
    """The norm in front of the router and the experts, in a layer without attention."""
    x.normed_sbH = maybe_recomputed(layer.recompute.attention, _norm, layer.stock, x.hidden_sbH)


def mlp(layer: OverlappingLayer, x: ChunkState) -> None:
    """Norm, MLP and residual of a layer without experts."""
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


FORWARD: Mapping[Verb, Callable[[OverlappingLayer, ChunkState], None]] = {
    Compute(OpKind.ATTENTION): attention,
    Compute(OpKind.NORM): norm,
    Compute(OpKind.MLP): mlp,
    AddResidual(OpKind.POSTPROCESS): add_residual,
}


def _attend(layer: TransformerLayer, hidden_sbH: torch.Tensor, chunk: Chunk) -> torch.Tensor:
    """Norm, self-attention and residual, [s, b, H]."""
    with at_positions(layer.self_attention, chunk), op_precision(layer.config, layer.layer_number):
        hidden_sbH, _ = layer._forward_attention(
            hidden_states=hidden_sbH,
            attention_mask=chunk.attention_mask,
            rotary_pos_emb=chunk.rotary_pos_emb,
            attention_bias=chunk.attention_bias,
        )
    return hidden_sbH


def _forward_mlp(layer: TransformerLayer, hidden_sbH: torch.Tensor) -> torch.Tensor:
    """Norm, MLP and residual, [s, b, H]."""
    with op_precision(layer.config, layer.layer_number):
        return layer._forward_mlp(hidden_sbH)


def _attend_and_norm(
    layer: TransformerLayer, hidden_sbH: torch.Tensor, chunk: Chunk
) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states after attention, and normed, both [s, b, H]."""
    hidden_sbH = _attend(layer, hidden_sbH, chunk)
    return hidden_sbH, _norm(layer, hidden_sbH)


def _norm(layer: TransformerLayer, hidden_sbH: torch.Tensor) -> torch.Tensor:
    """Input of the router and the experts, [s, b, H]."""
    normed_sbH: torch.Tensor = apply_module(layer.pre_mlp_layernorm)(hidden_sbH)
    return normed_sbH
