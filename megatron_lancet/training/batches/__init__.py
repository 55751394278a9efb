"""Micro-batches of documents: from a data iterator to all ranks of a model-parallel group, and to the model."""
