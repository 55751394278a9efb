"""Multi-token prediction in chunks."""
