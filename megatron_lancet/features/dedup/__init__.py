"""Deduplicated dispatch: one row per token and rank that holds any of its experts."""
