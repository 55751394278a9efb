"""A transformer layer: attention, norm, experts (or a dense MLP), residual; on one chunk, or whole around chunks."""

from collections.abc import Callable

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.typed_torch import apply_module
from megatron.core.utils import make_viewless_tensor

from megatron_lancet.model.attention import at_positions
from megatron_lancet.model.chunking import Chunk
from megatron_lancet.model.dispatcher.all_to_all import AllToAllDispatcher
from megatron_lancet.model.moe_layer import Steps, moe_steps
from megatron_lancet.runtime.all_to_all import Comm


def layer_steps(
    layer: TransformerLayer,
    dispatcher: AllToAllDispatcher | None,
    hidden: torch.Tensor,
    chunk: Chunk,
    comm: Comm,
) -> Steps:
    """Run one layer on one chunk.

    Args:
        dispatcher: of the layer's experts, None for a dense layer.
        hidden: [s, b, H].

    Returns:
        [s, b, H].
    """
    hidden = attend(layer, hidden, chunk)
    if dispatcher is None:
        return layer._forward_mlp(hidden)
    normed = apply_module(layer.pre_mlp_layernorm)(hidden)
    output = yield from moe_steps(layer.mlp, dispatcher, normed, chunk, comm)
    return _add_residual(layer, output, hidden)


def layer_around_experts(
    layer: TransformerLayer,
    hidden: torch.Tensor,
    whole: Chunk,
    run_experts: Callable[[torch.Tensor], torch.Tensor] | None,
) -> torch.Tensor:
    """Run one layer on a whole micro-batch, of which only the experts may run in chunks.

    Args:
        hidden: [S, B, H].
        whole: the micro-batch as one chunk.
        run_experts: from normed hidden states to the experts' output, both [S, B, H]; None for a dense layer.

    Returns:
        [S, B, H].
    """
    hidden = attend(layer, hidden, whole)
    if run_experts is None:
        return layer._forward_mlp(hidden)
    return _add_residual(layer, run_experts(apply_module(layer.pre_mlp_layernorm)(hidden)), hidden)


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
