"""Finds the language model in what a launcher builds."""

from typing import cast

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.hybrid.hybrid_model import HybridModel

from megatron_lancet.errors import UsageError
from megatron_lancet.model.gpt import LanguageModel

_FOREIGN = {"mcore_bridge": "Pass --bridge_backend megatron-bridge to ms-swift, which keeps Megatron's classes"}
"""Packages with parts of models that the overlap does not know, and what to do."""


def language_model_of(stage: torch.nn.Module) -> LanguageModel:
    """Returns the language model that a stage is, or holds.

    Raises:
        UsageError: it holds none, or more than one.
    """
    found = [module for module in stage.modules() if isinstance(module, GPTModel | HybridModel)]
    if len(found) != 1:
        raise UsageError(
            f"expected a model with one GPTModel or HybridModel of Megatron-Core, found {len(found)} in "
            f"{type(stage).__name__}. Call the overlap with the language model itself."
        )
    return cast(LanguageModel, found[0])


def device_of(model: torch.nn.Module) -> torch.device:
    """The device of a model's training; a builder may call its hooks before it moves the weights there."""
    device = next(model.parameters()).device
    moves_later = device.type == "cpu" and dist.Backend.NCCL in str(dist.get_backend())
    return torch.device("cuda", torch.cuda.current_device()) if moves_later else device


def has_experts(module: torch.nn.Module) -> bool:
    """Whether a module holds a language model with experts, on this rank or on another stage's."""
    models = (one for one in module.modules() if isinstance(one, GPTModel | HybridModel))
    return any(model.config.num_moe_experts is not None for model in models)


def refuse_foreign_parts(stage: torch.nn.Module) -> None:
    """Refuses parts that a launcher puts in place of Megatron's.

    Raises:
        UsageError: there is one; says what to switch.
    """
    for module in stage.modules():
        package = type(module).__module__
        for prefix, advice in _FOREIGN.items():
            if package == prefix or package.startswith(f"{prefix}."):
                raise UsageError(f"expected Megatron-Core's layers, found {package}.{type(module).__name__}. {advice}.")
