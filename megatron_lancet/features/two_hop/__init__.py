"""Dispatch in two hops: between nodes, then inside a node."""
