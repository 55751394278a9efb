"""Inference with a trained checkpoint: perplexity on a data set, and text generation."""
