"""Units of flags and files."""

BYTES_PER_MB = 1e6
"""MB are decimal."""


def mb_to_bytes(size_mb: float) -> int:
    """Converts a size above 0 from MB (10^6 bytes) to bytes, at least one."""
    return max(1, round(size_mb * BYTES_PER_MB))
