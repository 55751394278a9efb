"""Finds the language model in what a launcher builds."""

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from megatron_lancet.errors import UsageError
from megatron_lancet.model.gpt import LanguageModel
from megatron_lancet.model.linear import LinearByPlan

_LINEAR = (ColumnParallelLinear, RowParallelLinear, LinearByPlan)
"""Layers whose gradients a plan may defer."""
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


def check_gradient_hooks(stages: Sequence[torch.nn.Module]) -> None:
    """Compares gradient hooks on linear layers over the ranks. Collective over all ranks.

    A hook keeps the plan from deferring a gradient, so that DDP reduces it earlier in the backward pass.

    Args:
        stages: this rank's language models, prepared for the plan.

    Raises:
        UsageError: some ranks with a parameter have a hook on it, and others do not; the same on all ranks.
    """
    of_all = parallel_state.get_data_parallel_group(with_context_parallel=True)
    of_experts = parallel_state.get_expert_data_parallel_group()
    own = []
    for stage, model in enumerate(stages):
        for path, linear in model.named_modules():
            if not isinstance(linear, _LINEAR):
                continue
            for name, weight in cast(torch.nn.Module, linear).named_parameters(recurse=False):
                if weight._backward_hooks or weight._post_accumulate_grad_hooks:
                    group = of_all if getattr(weight, "allreduce", True) else of_experts
                    own.append((stage, f"{path}.{name}", tuple(dist.get_process_group_ranks(group))))
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    for stage, name, ranks in sorted({hooked for found in every for hooked in found}):
        having = [rank for rank in ranks if (stage, name, ranks) in every[rank]]
        if len(having) < len(ranks):
            raise UsageError(
                f"expected a gradient hook on {name} of all ranks {list(ranks)} or of none, found it on {having}: "
                "ranks would reduce gradients in different orders. Register it on all of these ranks, or set "
                "overlap_grad_reduce=False in the configuration of DDP."
            )
