"""Megatron-Lancet: Mixture-of-Experts training that hides the all-to-all of expert parallelism."""

__version__ = "0.1.0"
