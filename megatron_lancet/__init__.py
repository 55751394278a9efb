"""Megatron-Lancet: Mixture-of-Experts training that hides the all-to-all of expert parallelism."""

import logging

__version__ = "0.1.0"

# torch says so when Megatron imports this module on a machine without a GPU, once in every process. A run prints which
# device it found.
logging.getLogger("torch.utils.cpp_extension").addFilter(
    lambda record: not str(record.msg).startswith("No CUDA runtime is found")
)
