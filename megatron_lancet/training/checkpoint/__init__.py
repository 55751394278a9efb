"""Checkpoints: loading, saving, reading, resizing, and the check that they are complete."""
