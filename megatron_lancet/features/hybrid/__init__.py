"""Hybrid models: stacks of layers with one part each."""
