"""Rows of tokens: packed into messages, copied, and summed."""
