"""Attention and routing of layers in one chunk, captured in CUDA graphs."""
