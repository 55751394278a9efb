"""Measures what a model's ops and links cost, and what its layers keep in memory."""
