"""Rows in tiles: a chunk has several messages with a part of its rows each (Comet section 3)."""
