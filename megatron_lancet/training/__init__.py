"""Megatron's training, started with the overlapping model. The only package that imports megatron.training."""
