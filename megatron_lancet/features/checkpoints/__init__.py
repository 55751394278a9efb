"""Checkpoints that are complete: checks, loading, saving, SIGTERM."""
