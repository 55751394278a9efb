"""Devices that a run can use: CUDA, a CPU that stands in for it, a mocked group of ranks."""
