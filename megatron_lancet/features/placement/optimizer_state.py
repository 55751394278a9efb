"""The state of a parameter in an optimizer of Megatron: the fp32 copy, and moments."""

from typing import Any

import torch
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_lancet.features.placement.layers import OptimizerTensors


def tensors_beside(optimizer: Any) -> OptimizerTensors:
    """A function that returns a parameter's further tensors, in an order that is the same for all experts.

    Args:
        optimizer: Megatron's; with the distributed one, a parameter's whole state must be on this rank.
    """
    parts = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    main_of: dict[torch.nn.Parameter, tuple[torch.Tensor, Any]] = {}
    for part in parts:
        if isinstance(part, DistributedOptimizer):
            for parameter, (group, order) in part.model_param_group_index_map.items():
                main_of[parameter] = part.optimizer.param_groups[group]["params"][order], part.optimizer
            continue
        for owned in part.get_parameters():
            main_of[owned] = owned, part.optimizer

    def beside(parameter: torch.nn.Parameter) -> list[torch.Tensor]:
        own = getattr(parameter, "main_param", None)
        main, its_optimizer = main_of[parameter if own is None or parameter in main_of else own]
        state = its_optimizer.state.get(main, {})
        moments = [state[name] for name in sorted(state) if _is_like(state[name], main)]
        assert main.numel() == parameter.numel(), "a part of the optimizer's state is on another rank"
        is_copy = main.data_ptr() != parameter.data_ptr()
        return [main, *moments] if is_copy else moments

    return beside


def _is_like(value: Any, main: torch.Tensor) -> bool:
    """Whether a value is a moment; a count of steps is the same for all parameters."""
    return isinstance(value, torch.Tensor) and value.shape == main.shape
