"""Chooses the plan that a run starts with, from its flags or a file, and refuses what it does not support."""
