"""Formats tables as aligned text."""

from collections.abc import Sequence
from itertools import repeat


def right_aligned(rows: Sequence[Sequence[str]], widths: Sequence[int] = (), gap: str = "  ") -> list[str]:
    """Returns the lines of a table whose columns are aligned to the right.

    Args:
        rows: cells of each line; all lines have the same number.
        widths: minimum width of each column; empty for none.
        gap: text between columns.
    """
    least = widths or repeat(0, len(rows[0]))
    full = [max(width, *map(len, column)) for width, column in zip(least, zip(*rows, strict=True), strict=True)]
    return [gap.join(cell.rjust(width) for cell, width in zip(row, full, strict=True)) for row in rows]
