"""Weights of Hugging Face's in and out: a run starts from a folder and writes folders."""
