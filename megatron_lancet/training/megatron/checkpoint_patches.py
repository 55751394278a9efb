"""Lets parts of a run see the arguments that a checkpoint was saved with; see ``patches.py``."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from megatron.training import checkpointing

from megatron_lancet.patching import around


def checkpoint_arguments(look: Callable[[Any], None]) -> AbstractContextManager[None]:
    """Calls ``look`` with the arguments that a checkpoint was saved with, when Megatron resumes from one."""

    def check_checkpoint_args(stock: Any, checkpoint_args: Any, *args: Any, **kwargs: Any) -> Any:
        result = stock(checkpoint_args, *args, **kwargs)
        look(checkpoint_args)
        return result

    return around(checkpointing, "check_checkpoint_args", check_checkpoint_args)


def arguments_before_loading(look: Callable[[Any], None]) -> AbstractContextManager[None]:
    """Calls ``look`` with the arguments that a checkpoint was saved with, once or twice, before the run goes on."""

    def load_base_checkpoint(stock: Any, load_dir: Any, args: Any, rank0: bool = False, **kwargs: Any) -> Any:
        result = stock(load_dir, args, rank0=rank0, **kwargs)
        if result[0] is not None and result[0].get("args") is not None:  # some formats are read with rank0=False alone
            look(result[0]["args"])
        return result

    return around(checkpointing, "_load_base_checkpoint", load_base_checkpoint)
