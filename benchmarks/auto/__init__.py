"""Whole trainings: what ``--lancet-plan auto`` brings, against stock, Megatron's own overlap and fixed plans."""
