"""Finds the language model in what a launcher builds."""

from typing import cast

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.transformer.moe.moe_layer import MoELayer

from megatron_lancet.errors import UsageError
from megatron_lancet.model.gpt import LanguageModel


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


def has_experts(module: torch.nn.Module) -> bool:
    """Whether some layer has experts."""
    return any(isinstance(one, MoELayer) for one in module.modules())
