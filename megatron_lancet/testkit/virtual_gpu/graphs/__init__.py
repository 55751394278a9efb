"""CUDA graphs of a virtual GPU."""
