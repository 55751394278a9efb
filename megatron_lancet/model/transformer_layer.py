"""A transformer layer: attention, norm, experts (or a dense MLP), residual; on one chunk, or whole around chunks."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.typed_torch import apply_module
from megatron.core.utils import make_viewless_tensor

from megatron_lancet.model.attention import SwitchableAttention, at_positions
from megatron_lancet.model.chunking import Chunk
from megatron_lancet.model.moe_layer import OverlappingMoE, Steps, moe_steps
from megatron_lancet.model.recompute import NOTHING, Recompute, maybe_recomputed
from megatron_lancet.runtime.comm import Comm
from megatron_lancet.runtime.trace import enter, leave
from megatron_lancet.schedule.ops import OpKind


@dataclass(frozen=True)
class OverlappingLayer:
    """A layer that Megatron built, prepared for chunks.

    Attributes:
        stock: the layer.
        moe: its experts, None for a dense layer.
        attention: its self-attention's kernel.
        comm: all-to-alls of the model.
        recompute: which of its segments are recomputed in the backward pass.
    """

    stock: TransformerLayer
    moe: OverlappingMoE | None
    attention: SwitchableAttention
    comm: Comm
    recompute: Recompute = NOTHING


def layer_steps(layer: OverlappingLayer, hidden: torch.Tensor, chunk: Chunk) -> Steps:
    """Run one layer on one chunk.

    Args:
        hidden: [s, b, H].

    Returns:
        [s, b, H].
    """
    if layer.moe is None:
        return _run_dense(layer, hidden, chunk)
    hidden, normed = _attend_and_norm(layer, hidden, chunk)
    output = yield from moe_steps(layer.moe, normed, chunk)
    hidden = _add_residual(layer.stock, output, hidden)
    leave(layer.comm.trace, layer.stock.layer_number, chunk.index, OpKind.POSTPROCESS)
    return hidden


def layer_around_experts(
    layer: OverlappingLayer,
    hidden: torch.Tensor,
    whole: Chunk,
    run_experts: Callable[[OverlappingMoE, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Run one layer on a whole micro-batch, of which only the experts may run in chunks.

    Args:
        hidden: [S, B, H].
        whole: the micro-batch as one chunk.
        run_experts: from normed hidden states to the experts' output, both [S, B, H].

    Returns:
        [S, B, H].
    """
    if layer.moe is None:
        return _run_dense(layer, hidden, whole)
    hidden, normed = _attend_and_norm(layer, hidden, whole)
    place = layer.stock.layer_number, whole.index
    output = enter(layer.comm.trace, run_experts(layer.moe, normed), *place, OpKind.POSTPROCESS)
    hidden = _add_residual(layer.stock, output, hidden)
    leave(layer.comm.trace, *place, OpKind.POSTPROCESS)
    return hidden


def _run_dense(layer: OverlappingLayer, hidden: torch.Tensor, chunk: Chunk) -> torch.Tensor:
    trace, place = layer.comm.trace, (layer.stock.layer_number, chunk.index)
    hidden = enter(trace, hidden, *place, OpKind.ATTENTION)
    hidden = maybe_recomputed(layer.recompute.attention, attend, layer.stock, hidden, chunk)
    leave(trace, *place, OpKind.ATTENTION)
    hidden = enter(trace, hidden, *place, OpKind.MLP)
    hidden = maybe_recomputed(layer.recompute.mlp, layer.stock._forward_mlp, hidden)
    leave(trace, *place, OpKind.MLP)
    return hidden


def _attend_and_norm(layer: OverlappingLayer, hidden: torch.Tensor, chunk: Chunk) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states after attention, and normed for the router and the experts; all [s, b, H]."""

    def segment(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = attend(layer.stock, hidden, chunk)
        return hidden, apply_module(layer.stock.pre_mlp_layernorm)(hidden)

    trace, place = layer.comm.trace, (layer.stock.layer_number, chunk.index)
    hidden = enter(trace, hidden, *place, OpKind.ATTENTION)
    hidden, normed = maybe_recomputed(layer.recompute.attention, segment, hidden)
    leave(trace, *place, OpKind.ATTENTION)
    return hidden, normed


def attend(layer: TransformerLayer, hidden: torch.Tensor, chunk: Chunk) -> torch.Tensor:
    """Norm, self-attention and residual of one chunk, [s, b, H] to [s, b, H]."""
    with at_positions(layer.self_attention, chunk):
        hidden, _ = layer._forward_attention(
            hidden_states=hidden,
            attention_mask=chunk.attention_mask,
            rotary_pos_emb=chunk.rotary_pos_emb,
            attention_bias=chunk.attention_bias,
        )
    return hidden


def _add_residual(layer: TransformerLayer, output: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    residual = hidden.float() if layer.config.fp32_residual_connection else hidden
    with layer.bias_dropout_add_exec_handler():
        add_residual = layer.mlp_bda(layer.training, layer.config.bias_dropout_fusion)
        hidden = add_residual((output, None), residual, layer.hidden_dropout)
    return make_viewless_tensor(inp=hidden, requires_grad=hidden.requires_grad, keep_graph=True)
