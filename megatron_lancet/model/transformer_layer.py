"""One chunk's way through a transformer layer: attention, norm, experts (or a dense MLP), residual."""

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.typed_torch import apply_module
from megatron.core.utils import make_viewless_tensor

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
        hidden: [S, b, H].

    Returns:
        [S, b, H].
    """
    hidden, _ = layer._forward_attention(
        hidden_states=hidden,
        attention_mask=chunk.attention_mask,
        rotary_pos_emb=chunk.rotary_pos_emb,
        attention_bias=chunk.attention_bias,
    )
    if dispatcher is None:
        return layer._forward_mlp(hidden)

    normed = apply_module(layer.pre_mlp_layernorm)(hidden)
    residual = hidden.float() if layer.config.fp32_residual_connection else hidden
    output = yield from moe_steps(layer.mlp, dispatcher, normed, chunk, comm)
    with layer.bias_dropout_add_exec_handler():
        add_residual = layer.mlp_bda(layer.training, layer.config.bias_dropout_fusion)
        hidden = add_residual((output, None), residual, layer.hidden_dropout)
    return make_viewless_tensor(inp=hidden, requires_grad=hidden.requires_grad, keep_graph=True)
