"""Transformer Engine's modules, called once per chunk instead of once per micro-batch. Imports without it."""
