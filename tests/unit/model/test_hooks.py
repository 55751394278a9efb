"""Hooks that chunks would pass by are refused, not forgotten."""

import itertools
from collections import Counter
from unittest import mock

import pytest
import torch
from megatron.core.transformer.moe.moe_layer import MoELayer

from megatron_lancet.errors import UsageError
from megatron_lancet.model.adopt import refuse_bypassed_hooks
from megatron_lancet.runtime.comm import Comm
from megatron_lancet.runtime.transport.local import LocalTransport
from megatron_lancet.runtime.weight_grad_store import WeightGradStore
from megatron_lancet.schedule.plan import fixed_plan
from tests.fakes import cpu_stats
from tests.small_gpt import EXPERTS, SEQ_LENGTH, small_gpt, transformer_config

PARTS = ("self_attention", "self_attention.linear_qkv", "pre_mlp_layernorm", "mlp.router", "mlp.experts")


def layer_with_experts() -> torch.nn.Module:
    layer = torch.nn.Module()
    layer.mlp = MoELayer.__new__(MoELayer)
    torch.nn.Module.__init__(layer.mlp)
    layer.mlp.router = torch.nn.Linear(2, 2)
    return layer


def overlapped(num_chunks: int, **settings):
    """A whole model on one rank, cut into chunks."""
    from megatron_lancet.model.gpt import overlap

    model = small_gpt(transformer_config(**{**EXPERTS, "num_layers": 1, **settings}))
    plan, stats = fixed_plan(num_chunks), cpu_stats()
    store = WeightGradStore.of(plan, stats)
    overlap(model, plan, Comm(LocalTransport(), store, stats, own_rank=0))
    return model


def run(model) -> None:
    tokens = torch.arange(4 * SEQ_LENGTH).view(4, SEQ_LENGTH)
    model(tokens, torch.arange(SEQ_LENGTH).expand(4, -1), None, labels=tokens).mean().backward()


def watch(*args):
    """A user's hook."""


@pytest.mark.parametrize(
    ("register", "kind"),
    [
        (torch.nn.Module.register_forward_hook, "forward"),
        (torch.nn.Module.register_forward_pre_hook, "forward pre-"),
        (torch.nn.Module.register_full_backward_hook, "backward"),
        (torch.nn.Module.register_full_backward_pre_hook, "backward pre-"),
    ],
)
@pytest.mark.parametrize("on_experts", [False, True])
def test_hooks_on_a_layer_are_refused(register, kind, on_experts):
    layer = layer_with_experts()
    handle = register(layer.mlp if on_experts else layer, watch)
    with pytest.raises(UsageError, match=f"the {kind} hook watch on {'MoELayer' if on_experts else 'Module'}"):
        refuse_bypassed_hooks(layer)
    handle.remove()
    refuse_bypassed_hooks(layer)


def test_hooks_of_ddp_on_a_layer_are_accepted():
    layer = layer_with_experts()

    def gathered(*args):
        """Stands for DDP's, which waits for a module's parameters."""

    gathered.__module__ = "megatron.core.distributed.distributed_data_parallel"
    layer.register_forward_pre_hook(gathered)
    refuse_bypassed_hooks(layer)


@pytest.mark.parametrize("num_chunks", [1, 2])
def test_hooks_on_parts_run_once_per_chunk(one_rank, num_chunks):
    model = overlapped(num_chunks)
    ran: Counter[tuple[str, str]] = Counter()

    def count(part: str, direction: str):
        def hook(*args):
            ran[part, direction] += 1

        return hook

    for name in PARTS:
        part = model.decoder.layers[0].get_submodule(name)
        part.register_forward_hook(count(name, "forward"))
        part.register_full_backward_hook(count(name, "backward"))
    run(model)
    assert ran == dict.fromkeys(itertools.product(PARTS, ("forward", "backward")), num_chunks)


@pytest.mark.parametrize("num_chunks", [1, 2])
def test_weight_in_recomputed_attention_has_one_gradient(one_rank, num_chunks):
    """Megatron's own checkpoint gives one per chunk, and DDP counts them: the number may change with the plan."""
    settings = {"softmax_type": "learnable", "recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    model = overlapped(num_chunks, **settings)
    stock = small_gpt(transformer_config(**{**EXPERTS, "num_layers": 1, **settings}))
    stock.load_state_dict(model.state_dict())
    gradients, (offsets, expected) = [], (one.decoder.layers[0].self_attention.core_attention for one in (model, stock))
    offsets.softmax_offset.register_post_accumulate_grad_hook(lambda weight: gradients.append(weight.grad.clone()))
    runs = mock.Mock(wraps=offsets.scale_mask_softmax.forward)
    with mock.patch.object(offsets.scale_mask_softmax, "forward", runs):
        run(model)
    run(stock)
    (gradient,) = gradients
    expected = expected.softmax_offset.grad
    assert (gradient - expected).norm() <= (0.0 if num_chunks == 1 else 1e-6) * expected.norm()
    assert runs.call_count == 2 * num_chunks
