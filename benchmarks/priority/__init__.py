"""Gradient reductions and all-to-alls on one shaped link: who goes first."""
