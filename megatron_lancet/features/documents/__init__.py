"""Micro-batches of packed documents: positions attend to their own document only."""
