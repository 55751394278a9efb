"""Lina's priority: all-to-alls go before gradient reductions."""
