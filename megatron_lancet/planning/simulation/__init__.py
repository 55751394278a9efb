"""Predicts the step time of a plan from the costs of a profile."""
