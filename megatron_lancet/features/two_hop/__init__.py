"""Dispatch in two hops: one row per token and node, and from there one per token and rank."""
