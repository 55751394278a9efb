"""Modules of Transformer Engine, called once per chunk."""
