"""Makes a model that Megatron has built run a plan: a GPT, or a hybrid model of attention, MoE and MLP layers."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import Any, cast

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import MoETransformerLayer, TransformerLayer

from megatron_lancet.errors import UsageError
from megatron_lancet.model.adopt import ByPlan, adopt, unknown_class
from megatron_lancet.model.attention.masks import check_mask_type
from megatron_lancet.model.attention.switchable import SwitchableAttention
from megatron_lancet.model.dispatcher.all_to_all import AllToAllDispatcher
from megatron_lancet.model.dispatcher.base import Dispatcher, ExpertRanks
from megatron_lancet.model.linear import LinearByPlan, can_defer, defer_weight_grad
from megatron_lancet.model.ops import trace_ends
from megatron_lancet.model.overlapping_moe import OverlappingMoE
from megatron_lancet.model.parts import Stack, document_reader
from megatron_lancet.model.recompute import Recompute, recompute_of_layer
from megatron_lancet.model.routing.router import ChunkedTopKRouter
from megatron_lancet.model.transformer_block import LayersByPlan, OverlappingTransformerBlock
from megatron_lancet.model.transformer_layer import OverlappingLayer, check_ops
from megatron_lancet.registry import model_parts
from megatron_lancet.runtime.comm import Comm
from megatron_lancet.schedule.dispatch import PLAIN, Dispatch
from megatron_lancet.schedule.layers import LayerKind
from megatron_lancet.schedule.ops import Op, OpKind, Phase
from megatron_lancet.schedule.plan import ChunkDim, DwPolicy, Plan, Segment

_LAYER_CLASSES = (TransformerLayer, MoETransformerLayer, MLPLayer)
type LanguageModel = GPTModel | HybridModel


def overlap(
    model: LanguageModel,
    plan: Plan,
    comm: Comm,
    sdpa: bool = False,
    overlaps_evaluation: bool = False,
    documents: bool = False,
    wiring: str = "",
) -> None:
    """Gives ``model`` the overlapping stack of layers, in place; parameters and their names stay.

    Call it after Megatron built the model and before DDP wraps it. With a store in ``comm`` the linear layers are
    prepared for deferral, also where this plan defers nothing, so that :func:`set_plan` can set any other plan.

    Args:
        sdpa: use torch's fused attention kernel also where a plan doesn't need it.
        overlaps_evaluation: also run forward passes without gradients by the plan.
        documents: prepare all attentions for packed documents (``packed_seq_params``), which need the fused kernel.
        wiring: see :class:`OverlappingLayer`.

    Raises:
        UsageError: the overlapping block does not support a part of the model, or the plan is another model's.
    """
    own_class = next(filter(None, (part.block_class(model) for part in model_parts())), OverlappingTransformerBlock)
    block: LayersByPlan = adopt(model.decoder, own_class)
    block.comm = comm
    block.overlapping_layers = [
        replace(_prepare_layer(layer, layer.layer_number, recompute_of_layer(model.config, index), comm), wiring=wiring)
        for index, layer in enumerate(cast(Any, block.layers))
    ]
    block.following = Op.beside_layers(Phase.FORWARD, OpKind.HEAD) if model.post_process else None
    for part in model_parts():
        part.prepare_layers(model, comm, _prepare_layer)
    for part in model_parts():
        part.adopt_modules(model)
    if comm.store is not None:
        for linear, name in _deferrable_linears(model):
            if isinstance(linear, LinearByPlan):
                linear.begin_deferring(name, comm.store)
            else:
                defer_weight_grad(linear, name, comm.store)
    for several in chain.from_iterable(part.parts_with_several_uses(model) for part in model_parts()):
        for module in several.modules():
            if isinstance(module, LinearByPlan):
                module.has_several_uses = True
    trace_ends(model, comm)
    block.uses_sdpa_everywhere, block.overlaps_evaluation = sdpa or documents, overlaps_evaluation
    if documents:
        _prepare_for_documents(model)
    set_plan(model, plan)


def set_plan(model: LanguageModel, plan: Plan) -> None:
    """Makes a model that :func:`overlap` prepared run ``plan`` from the next step on. Call between steps.

    All ranks must do so between the same two steps. Only the order of sums changes.

    Raises:
        UsageError: the plan is another model's, or needs what the model lacks; the model is unchanged then.
        AssertionError: the last backward pass is not over, or the plan defers dW and the model is not prepared for it.
    """
    block = model.decoder
    assert isinstance(block, LayersByPlan)
    check_plan(plan, model, block.comm.settings.max_expert_rows)
    layers = overlapping_layers(model)
    # A repeated layer has several numbers.
    segments: dict[torch.nn.Module, list[Segment]] = {layer.stock: [] for layer in layers}
    for layer in layers:
        segments[layer.stock] += [plan.segment_of(layer.number), plan.at_ends.segment_of(layer.number)]
    attentions = {layer.attention: segments[layer.stock] for layer in layers if layer.attention is not None}
    prefixed = {
        attention
        for attention, its_segments in attentions.items()
        if block.uses_sdpa_everywhere or plan.fused_attention or any(map(_needs_sdpa, its_segments))
    }
    for attention in prefixed:
        attention.check(block.documents is not None and any(map(_needs_sdpa, attentions[attention])))
    for layer in layers:
        if layer.attention in prefixed:
            check_mask_type(layer.stock.self_attention)
    for segment in (*plan.segments, *plan.at_ends.segments):
        check_ops(segment, plan.dispatch, layers)
    store = block.comm.store
    needs_store = plan.dw_policy is not DwPolicy.NONE or (plan.has_tiles and not block.overlaps_evaluation)
    assert store is not None or not needs_store, "dW can't be deferred in a model without a store"
    if store is not None:
        store.configure(plan)
    block.comm.use(replace(block.comm.settings, dispatch=plan.dispatch, keeps_one_order=plan.is_paired))
    for stack in _stacks(model):
        stack.run_by(plan)
    for attention in attentions:
        if attention in prefixed:
            attention.use_prefixed()
        else:
            attention.use_built()
    for layer in layers:
        _set_exact(layer.prediction or layer.stock, all(map(_is_exact, segments[layer.stock])))
    if model.post_process:
        _set_exact(model.output_layer, _is_exact(plan.segments[-1]) and _is_exact(plan.at_ends.segments[-1]))


def _prepare_for_documents(model: LanguageModel) -> None:
    block = model.decoder
    block.documents = document_reader(model)
    for layer in overlapping_layers(model):
        if layer.attention is not None:
            layer.attention.begin_documents()
        if layer.prediction is not None:
            layer.prediction.documents = block.documents


def num_forward_waits(model: LanguageModel, at_end: bool) -> int:
    """Number of all-to-alls that the forward of a micro-batch waits for.

    Args:
        at_end: whether it is one at an end of a step with pairing.
    """
    return sum(stack.num_waits(at_end) for stack in _stacks(model))


def overlapping_layers(model: LanguageModel) -> list[OverlappingLayer]:
    """The layers of a model that :func:`overlap` prepared, in order; a repeated layer once for each of its numbers."""
    return [layer for stack in _stacks(model) for layer in stack.overlapping_layers]


def _stacks(model: LanguageModel) -> list[Stack]:
    """The decoder, and the stacks of layers behind it."""
    return [model.decoder, *chain.from_iterable(part.stacks(model) for part in model_parts())]


def check_plan(plan: Plan, model: LanguageModel, max_expert_rows: int | None) -> None:
    """
    Args:
        max_expert_rows: rows of a chunk that a rank's experts may work on at a time; None for any number.

    Raises:
        UsageError: the plan is another model's, or needs what the model lacks.
    """
    check_layers(plan, model.config.num_layers + (model.config.mtp_num_layers or 0))
    for part in model_parts():
        part.check_plan(plan, model, max_expert_rows)


def check_layers(plan: Plan, num_layers: int) -> None:
    """
    Raises:
        UsageError: the plan's segments do not fit a model with ``num_layers`` layers.
    """
    for last in (plan.segments[-1], plan.at_ends.segments[-1]):
        if last.first_layer > num_layers or last.last_layer not in (None, num_layers):
            raise UsageError(
                f"the plan is of a model with {last.last_layer or f'at least {last.first_layer}'} layers, and this one "
                f"has {num_layers}. Use a plan that was made for this model."
            )


def _needs_sdpa(segment: Segment) -> bool:
    return segment.num_chunks > 1 and segment.chunk_dim is ChunkDim.SEQUENCE and segment.range.has_attention


def _is_exact(segment: Segment) -> bool:
    """One chunk gives stock's results to the bit; with more, the order of sums changes anyway."""
    return segment.num_chunks == 1


def _set_exact(part: torch.nn.Module, exact: bool) -> None:
    """Sets whether a part of the model keeps stock's order of sums."""
    for module in part.modules():
        if isinstance(module, ByPlan):
            module.keep_stocks_order(exact)


def _prepare_layer(layer: Any, number: int, recompute: Recompute, comm: Comm) -> OverlappingLayer:
    if type(layer) not in _LAYER_CLASSES:  # a layer of a derived class may do more than its parts
        raise unknown_class(TransformerLayer, layer)
    kind = kind_of(layer)
    attention = SwitchableAttention(layer.self_attention, recompute.attention) if kind.has_attention else None
    if not kind.has_experts:
        layer.recompute_mlp = False  # ours now
        if recompute.mlp:
            layer.recompute_pre_mlp_layernorm = False  # part of what runs again
        return OverlappingLayer(number, layer, kind, None, attention, comm, recompute)
    layer.mlp.shared_experts_recompute = False
    if recompute.experts and hasattr(layer.mlp.experts, "activation_recompute"):
        layer.mlp.experts.activation_recompute = False  # part of what runs again
    adopt(layer.mlp.router, ChunkedTopKRouter).begin_micro_batch()
    for part in model_parts():
        part.adopt_experts(layer.mlp.experts)
    stock = layer.mlp.token_dispatcher
    config = layer.config
    ranks = ExpertRanks(comm, config.num_moe_experts, stock.ep_size, stock.tp_group, stock.ep_group.rank())
    fused, dense = config.moe_permute_fusion, any(part.needs_dense_rows(layer.mlp.experts) for part in model_parts())
    dispatchers: dict[Dispatch, Dispatcher] = {PLAIN: AllToAllDispatcher(*ranks[:-1], fused, dense)}
    for part in model_parts():
        dispatchers |= part.dispatchers(ranks)
    moe = OverlappingMoE(number, layer.mlp, dispatchers, comm, recompute)
    return OverlappingLayer(number, layer, kind, moe, attention, comm, recompute)


def kind_of(layer: TransformerLayer) -> LayerKind:
    """The parts of a layer that Megatron built: those that it lacks are identities."""
    has_attention = not isinstance(layer.self_attention, IdentityOp)
    if isinstance(layer.mlp, MoELayer):
        return LayerKind.MOE if has_attention else LayerKind.MOE_ONLY
    if isinstance(layer.mlp, IdentityOp):
        return LayerKind.ATTENTION_ONLY
    return LayerKind.DENSE if has_attention else LayerKind.MLP_ONLY


def _deferrable_linears(model: LanguageModel) -> Iterator[tuple[torch.nn.Module, str]]:
    """Yields linear layers with the names of their dWs; the output layer only where its weight is its own."""
    owners: dict[torch.nn.Module, OverlappingLayer] = {}
    for layer in overlapping_layers(model):
        owners.setdefault(layer.stock, layer)  # a repeated layer's first number
    for layer in owners.values():
        parts = list(layer.stock.named_modules())
        if layer.prediction is not None:
            parts.append(("eh_proj", layer.prediction.eh_proj))
        for name, module in parts:
            if _has_deferrable_weight_grad(module):
                yield module, str(Op.weight_grad(layer.number, name))
    owns_output_layer = model.post_process and not model.share_embeddings_and_output_weights
    if owns_output_layer and _has_deferrable_weight_grad(model.output_layer):
        yield model.output_layer, str(Op.weight_grad(None, "output_layer"))


def _has_deferrable_weight_grad(module: torch.nn.Module) -> bool:
    return module.trains_weight if isinstance(module, LinearByPlan) else can_defer(module)
