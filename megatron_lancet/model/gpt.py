"""Makes a GPT model that Megatron has built run by a plan."""

from collections.abc import Iterator

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_lancet.model.adopt import adopt
from megatron_lancet.model.attention import attend_with_sdpa
from megatron_lancet.model.delayed_wgrad import delays_own_weight_grad, feed_from
from megatron_lancet.model.dispatcher.all_to_all import AllToAllDispatcher
from megatron_lancet.model.experts import GroupingSequentialMLP
from megatron_lancet.model.linear import can_defer, defer_weight_grad
from megatron_lancet.model.moe_layer import OverlappingMoE
from megatron_lancet.model.recompute import recompute_of_layer
from megatron_lancet.model.router import ChunkedTopKRouter
from megatron_lancet.model.transformer_block import OverlappingTransformerBlock
from megatron_lancet.model.transformer_layer import OverlappingLayer
from megatron_lancet.runtime.comm import Comm
from megatron_lancet.schedule.plan import ChunkDim, Plan


def overlap(model: GPTModel, plan: Plan, comm: Comm, sdpa: bool = False) -> None:
    """Give ``model`` the overlapping transformer block, in place; parameters and their names stay as they are.

    Call it after Megatron built the model and before DDP wraps it.

    Args:
        sdpa: use torch's fused attention kernel also where the plan doesn't need it.

    Raises:
        UsageError: the model has parts that the overlapping block does not know.
    """
    block = adopt(model.decoder, OverlappingTransformerBlock)
    block.plan = plan
    block.comm = comm
    # With one chunk results are stock's to the bit; chunks change the order of sums anyway, so that others may too.
    exact = plan.num_chunks == 1
    block.overlapping_layers = [_prepare_layer(layer, index, comm, exact) for index, layer in enumerate(block.layers)]
    needs_sdpa = plan.num_chunks > 1 and plan.chunk_dim is ChunkDim.SEQUENCE and plan.range.has_attention
    if sdpa or needs_sdpa:
        for layer in block.overlapping_layers:
            attend_with_sdpa(layer.stock.self_attention, layer.recompute.attention)
    if comm.store is not None:
        for linear, name in _deferrable_linears(model):
            if delays_own_weight_grad(linear):
                feed_from(linear, name, comm.store)
            else:
                defer_weight_grad(linear, name, comm.store, accumulate_in_gemm=not exact)


def _prepare_layer(layer: torch.nn.Module, index_in_stage: int, comm: Comm, exact: bool) -> OverlappingLayer:
    assert isinstance(layer, TransformerLayer)
    recompute = recompute_of_layer(layer.config, index_in_stage)
    if not isinstance(layer.mlp, MoELayer):
        layer.recompute_mlp = False  # ours now
        return OverlappingLayer(layer, None, recompute)
    layer.mlp.shared_experts_recompute = False
    adopt(layer.mlp.router, ChunkedTopKRouter).begin_micro_batch()
    if type(layer.mlp.experts) is SequentialMLP and not exact:
        adopt(layer.mlp.experts, GroupingSequentialMLP)
    stock = layer.mlp.token_dispatcher
    dispatcher = AllToAllDispatcher(comm, layer.config.num_moe_experts, stock.ep_size, stock.tp_group)
    return OverlappingLayer(layer, OverlappingMoE(layer.mlp, dispatcher, comm, recompute), recompute)


def _deferrable_linears(model: GPTModel) -> Iterator[tuple[torch.nn.Module, str]]:
    """Linear layers of the block, and the output layer where its weight is its own."""
    for layer in model.decoder.layers:
        for name, module in layer.named_modules():
            if can_defer(module) or delays_own_weight_grad(module):
                yield module, f"L{layer.layer_number}.W.{name}"
    if model.post_process and not model.share_embeddings_and_output_weights and can_defer(model.output_layer):
        yield model.output_layer, "W.output_layer"
