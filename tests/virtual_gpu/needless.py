"""Places that may be deleted without harm to order and memory, each with the reason."""

NEEDLESS: dict[tuple[str, str, str], str] = {}
"""Reasons by file, function and line."""
