"""Inputs that Megatron's own training script does not pass: padding masks, pairs of rotary embeddings."""

from collections.abc import Callable
from typing import Any

import torch

_FIRST_TOKEN = 22
"""Smaller tokens are padding: about a third, anywhere in a sample, different on each rank."""


def take_inputs(overrides: dict[str, Any]) -> Callable[[torch.nn.Module], None]:
    """Removes the settings ``padded`` and ``rotary_pair`` from the overrides of a config.

    Returns:
        A function that makes a model receive such inputs.
    """
    padded, rotary_pair = overrides.pop("padded", False), overrides.pop("rotary_pair", False)

    def give_inputs(model: torch.nn.Module) -> None:
        if padded:
            model.register_forward_pre_hook(_add_padding_mask, with_kwargs=True)
        if rotary_pair:
            model.rotary_pos_emb.register_forward_hook(lambda _, args, angles: (angles, 2 * angles))

    return give_inputs


def _add_padding_mask(_: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return args, {**kwargs, "padding_mask": kwargs["input_ids"] < _FIRST_TOKEN}
