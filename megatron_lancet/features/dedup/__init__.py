"""Dispatch of one row per token and rank."""
