"""Turns a module that Megatron has built into an instance of our subclass of its class.

Megatron builds the model; then the modules whose behaviour differs change their class. So initialisation, parameter
order, checkpoint keys and process groups are Megatron's own, and none of its specs or constructors is repeated here.

A hook on a module whose parts are then called one by one would not run, so it is refused.
"""

from collections.abc import Iterator
from typing import cast

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer

from megatron_lancet.errors import UsageError


def adopt[ModuleT: torch.nn.Module](module: torch.nn.Module, subclass: type[ModuleT]) -> ModuleT:
    """Make ``module`` an instance of ``subclass``, whose last base is its present class.

    Raises:
        UsageError: the module is of another class, whose behaviour ``subclass`` would silently replace.
    """
    expected = subclass.__bases__[-1]
    if type(module) is not expected:
        raise unknown_class(expected, module)
    module.__class__ = subclass
    return cast(ModuleT, module)


class ByPlan:
    """Mixin for a module whose arithmetic follows the plan.

    Attributes:
        last_expert_first: whether the next forward pass of experts expects the last expert's rows first.
    """

    @property
    def last_expert_first(self) -> bool:
        return False

    def keep_stocks_order(self, keeps: bool) -> None:
        """Sets whether the module keeps stock's order of sums from the next step on."""
        raise NotImplementedError


def unknown_class(expected: type[torch.nn.Module], module: torch.nn.Module) -> UsageError:
    """The error for a module of an unknown class, derived classes included."""
    return UsageError(
        f"the overlapping model runs {expected.__name__}, but the model spec built "
        f"{type(module).__name__}. Drop the flag that selects it (--spec, for example), or pass --lancet-plan off."
    )


def is_of_ddp(hook: object) -> bool:
    """Whether a hook is Megatron's DDP's: it waits for gathered parameters of the module itself; layers have none."""
    return getattr(hook, "__module__", "").startswith("megatron.core.distributed")


def refuse_bypassed_hooks(layer: torch.nn.Module) -> None:
    """Refuses hooks on a transformer layer and on its MoE layer. Hooks on their parts run, once per chunk.

    Raises:
        UsageError: there is one.
    """
    mlp = getattr(layer, "mlp", None)
    for module in (layer, mlp) if isinstance(mlp, MoELayer) else (layer,):
        refuse_hooks(
            module,
            "chunks pass through the parts of the layer one by one. Register it on a part (self_attention, mlp.router, "
            "mlp.experts)",
        )


def refuse_hooks(module: torch.nn.Module, why: str) -> None:
    """Refuses hooks on a module, but DDP's.

    Args:
        why: why they would not run, and what to do.

    Raises:
        UsageError: there is one.
    """
    for kind, hook in _hooks(module):
        if not is_of_ddp(hook):
            name = getattr(hook, "__qualname__", type(hook).__name__)
            raise UsageError(
                f"the {kind} hook {name} on {type(module).__name__} would not run: {why}, or run with "
                "--lancet-plan off."
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
