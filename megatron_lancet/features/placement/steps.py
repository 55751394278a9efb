"""Megatron's training steps, for the optimizer that they call."""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from megatron.training import training

from megatron_lancet.patching import around


def optimizer_of_steps(take: Callable[[Any], None]) -> AbstractContextManager[None]:
    """Calls ``take`` with the optimizer of each training step, before the step."""

    def train_step(stock: Any, *args: Any, **kwargs: Any) -> Any:
        take(inspect.signature(stock).bind(*args, **kwargs).arguments["optimizer"])
        return stock(*args, **kwargs)

    return around(training, "train_step", train_step)
