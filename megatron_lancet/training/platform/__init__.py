"""Machines that a run can use: GPUs, a CPU in place of a GPU, one process in place of all ranks."""
