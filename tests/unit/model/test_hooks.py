"""Hooks that chunks would pass by are refused, not forgotten."""

import pytest
import torch
from megatron.core.transformer.moe.moe_layer import MoELayer

from megatron_lancet.errors import UsageError
from megatron_lancet.model.hooks import refuse_bypassed_hooks


def layer_with_experts() -> torch.nn.Module:
    layer = torch.nn.Module()
    layer.mlp = MoELayer.__new__(MoELayer)
    torch.nn.Module.__init__(layer.mlp)
    layer.mlp.router = torch.nn.Linear(2, 2)
    return layer


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


def test_hooks_on_parts_run_and_ddps_are_known():
    layer = layer_with_experts()
    layer.mlp.router.register_forward_hook(watch)

    def gathered(*args):
        """Stands for DDP's, which waits for a module's parameters."""

    gathered.__module__ = "megatron.core.distributed.distributed_data_parallel"
    layer.register_forward_pre_hook(gathered)
    refuse_bypassed_hooks(layer)
