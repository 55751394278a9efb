"""Megatron-Lancet: Mixture-of-Experts training that hides the all-to-all of expert parallelism.

``megatron_lancet.Overlap`` is for programs with a training loop of their own.
"""

import importlib
import logging

__version__ = "0.1.0"

# torch says so when Megatron imports this module on a machine without a GPU, once in every process. A run prints which
# device it found.
logging.getLogger("torch.utils.cpp_extension").addFilter(
    lambda record: not str(record.msg).startswith("No CUDA runtime is found")
)

_PUBLIC = {"Overlap": "megatron_lancet.library.overlap"}
"""Public names, and the modules that define them. These import torch and Megatron, and commands start without both."""


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)
