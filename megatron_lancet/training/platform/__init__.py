"""Machines that a run can use: GPUs, a CPU instead of a GPU, one process instead of all ranks."""
