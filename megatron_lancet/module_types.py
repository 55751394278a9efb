"""Tells Megatron-Bridge how the weights of a model that runs a plan are spread over ranks."""

from collections.abc import Sequence
from typing import Any

_OF_MODES = {"column": "column", "row": "row"}


def register_module_types(stages: Sequence[Any]) -> None:
    """Registers the classes of a model's modules for Bridge's conversion, which asks for them by name.

    Layers that defer weight gradients or run in chunks are subclasses of Megatron's, and spread like them.

    Args:
        stages: pipeline stages of this rank.

    Raises:
        ImportError: Bridge is not installed.
    """
    from megatron.bridge.models.conversion.param_mapping import AutoMapping

    known = {name: kind for kind, names in AutoMapping._MODULE_TYPE_REGISTRY.items() for name in names}
    for stage in stages:
        for module in stage.modules():
            names = [base.__name__ for base in type(module).__mro__]
            kind = next((known[name] for name in names if name in known), None)
            if kind is None and "TELinear" in names:  # only its instances know
                kind = _OF_MODES.get(module.parallel_mode, "replicated")
            if kind is not None:
                AutoMapping.register_module_type(type(module).__name__, kind)
