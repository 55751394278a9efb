"""Makes a GPT model that Megatron has built run by a plan."""

from collections.abc import Iterator

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_lancet.model.adopt import adopt
from megatron_lancet.model.delayed_wgrad import delays_own_weight_grad, feed_from
from megatron_lancet.model.dispatcher.all_to_all import AllToAllDispatcher
from megatron_lancet.model.experts import GroupingSequentialMLP
from megatron_lancet.model.linear import can_defer, defer_weight_grad
from megatron_lancet.model.router import ChunkedTopKRouter
from megatron_lancet.model.transformer_block import OverlappingTransformerBlock
from megatron_lancet.runtime.all_to_all import Comm
from megatron_lancet.schedule.plan import Plan


def overlap(model: GPTModel, plan: Plan, comm: Comm) -> None:
    """Give ``model`` the overlapping transformer block, in place; parameters and their names stay as they are.

    Call it after Megatron built the model and before DDP wraps it.

    Raises:
        UsageError: the model has parts that the overlapping block does not know.
    """
    block = adopt(model.decoder, OverlappingTransformerBlock)
    block.plan = plan
    block.comm = comm
    # With one chunk results are stock's to the bit; chunks change the order of sums anyway, so that others may too.
    exact = plan.num_chunks == 1
    block.dispatchers = [_prepare_layer(layer, comm, exact) for layer in block.layers]
    if comm.store is not None:
        for linear, name in _deferrable_linears(model):
            if delays_own_weight_grad(linear):
                feed_from(linear, name, comm.store)
            else:
                defer_weight_grad(linear, name, comm.store, accumulate_in_gemm=not exact)


def _prepare_layer(layer: torch.nn.Module, comm: Comm, exact: bool) -> AllToAllDispatcher | None:
    assert isinstance(layer, TransformerLayer)
    if not isinstance(layer.mlp, MoELayer):
        return None
    adopt(layer.mlp.router, ChunkedTopKRouter).begin_micro_batch()
    if type(layer.mlp.experts) is SequentialMLP and not exact:
        adopt(layer.mlp.experts, GroupingSequentialMLP)
    return AllToAllDispatcher(comm, layer.config.num_moe_experts, layer.mlp.ep_group.size())


def _deferrable_linears(model: GPTModel) -> Iterator[tuple[torch.nn.Module, str]]:
    """Linear layers of the block, and the output layer where its weight is its own."""
    for layer in model.decoder.layers:
        for name, module in layer.named_modules():
            if can_defer(module) or delays_own_weight_grad(module):
                yield module, f"L{layer.layer_number}.W.{name}"
    if model.post_process and not model.share_embeddings_and_output_weights and can_defer(model.output_layer):
        yield model.output_layer, "W.output_layer"
