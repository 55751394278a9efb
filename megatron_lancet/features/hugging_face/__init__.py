"""Hugging Face weights: a run starts from a folder, and writes folders."""
