"""Benchmarks of single parts: one process or two, each a script of its own on the frame of ``frame.py``."""
