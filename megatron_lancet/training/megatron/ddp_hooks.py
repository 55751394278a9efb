"""Access to the hooks by which Megatron's DDP learns that autograd has computed a gradient."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel

from megatron_lancet.patching import around

type Hook = Callable[..., None]


def around_ddp_hooks(wrap: Callable[[torch.nn.Parameter, Hook], Hook]) -> AbstractContextManager[None]:
    """Inside the context each hook that DDP registers at an accumulation node is ``wrap(parameter, hook)``."""

    def make(stock: Callable[..., Hook], ddp: Any, parameter: torch.nn.Parameter) -> Hook:
        hook = stock(ddp, parameter)
        if getattr(parameter, "skip_backward_post_hook", False):
            return hook  # the module that owns the parameter calls it
        return wrap(parameter, hook)

    return around(DistributedDataParallel, "_make_backward_post_hook", make)
