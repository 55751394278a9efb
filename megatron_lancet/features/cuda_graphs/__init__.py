"""Attention and routing of layers, captured in CUDA graphs."""
