"""Hooks that would not run: the block calls the parts of a layer, never the layer itself."""

from collections.abc import Iterator

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer

from megatron_lancet.errors import UsageError

_HANDLED = "megatron.core.distributed"
"""Whose hooks wait for gathered parameters: each module's own, of which layers have none."""


def refuse_bypassed_hooks(layer: torch.nn.Module) -> None:
    """Look for hooks on a transformer layer and on its experts' layer. Hooks on their parts run, once per chunk.

    Raises:
        UsageError: there are some.
    """
    for module in (layer, getattr(layer, "mlp", None)):
        if module is not layer and not isinstance(module, MoELayer):
            continue
        for kind, hook in _hooks(module):
            if not getattr(hook, "__module__", "").startswith(_HANDLED):
                name = getattr(hook, "__qualname__", type(hook).__name__)
                raise UsageError(
                    f"the {kind} hook {name} on {type(module).__name__} would not run: chunks pass through the parts "
                    "of the layer one by one. Register it on a part (self_attention, mlp.router, mlp.experts), or run "
                    "with --lancet-plan off."
                )


def _hooks(module: torch.nn.Module) -> Iterator[tuple[str, object]]:
    for kind, hooks in (
        ("forward", module._forward_hooks),
        ("forward pre-", module._forward_pre_hooks),
        ("backward", module._backward_hooks),
        ("backward pre-", module._backward_pre_hooks),
    ):
        for hook in hooks.values():
            yield kind, hook
