"""The program of a rank in a distributed test: calls a function of the test and saves its result as JSON.

Usage: worker.py MODULE:FUNCTION RESULT SETTINGS. Each rank writes RESULT.<rank>. :func:`tests.ranks.launch.results_of`
starts the ranks and describes the settings, which are JSON.
"""

import importlib
import json
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_lancet.training.platform.cpu import cpu_platform
from tests.te_cpu import te_platform


def platform_of(settings: dict[str, Any]) -> AbstractContextManager[Any]:
    """Megatron's CPU settings, with Transformer Engine's layers if the settings ask for them."""
    if settings["is_bare"]:
        return nullcontext()
    if not settings["te"]:
        return cpu_platform()
    capability, interprets_triton = settings["te"]
    return te_platform(tuple(capability), interprets_triton)


def main() -> None:
    """Runs the function that the command line names."""
    name, result, text = sys.argv[1:]
    settings = json.loads(text)
    module, _, function = name.partition(":")
    with platform_of(settings):
        if settings["joins"]:
            dist.init_process_group("gloo")
        found = getattr(importlib.import_module(module), function)(*settings["args"])
        rank = dist.get_rank() if settings["joins"] else 0
        Path(f"{result}.{rank}").write_text(json.dumps(found))
        if settings["joins"]:
            dist.barrier()  # a rank that ends early makes the others fail
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
