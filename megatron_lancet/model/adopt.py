"""Turns a module that Megatron has built into our subclass of its class.

Megatron builds the model; then the modules whose behaviour differs change their class. So initialisation, parameter
order, checkpoint keys and process groups are Megatron's own, and no spec or constructor of its is repeated here.
"""

from typing import cast

import torch

from megatron_lancet.errors import UsageError


def adopt[ModuleT: torch.nn.Module](module: torch.nn.Module, subclass: type[ModuleT]) -> ModuleT:
    """Make ``module`` an instance of ``subclass``, whose last base is its present class.

    Raises:
        UsageError: the module is of another class, whose behaviour ``subclass`` would silently replace.
    """
    expected = subclass.__bases__[-1]
    if type(module) is not expected:
        raise UsageError(
            f"the overlapping model knows how to run {expected.__name__}, but the model spec built "
            f"{type(module).__name__}. Use --transformer-impl local without --spec, or --lancet-plan off."
        )
    module.__class__ = subclass
    return cast(ModuleT, module)
