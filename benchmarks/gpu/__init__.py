"""What the overlap is worth on one GPU that plays a rank of an expert-parallel group: ``python -m benchmarks.gpu``."""
