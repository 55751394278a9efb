"""Resuming with another expert-parallel size: ``--lancet-separate-expert-grads``."""
