"""Fits a short curve to the measured times of messages."""

import statistics
from collections.abc import Iterable, Sequence

from megatron_lancet.planning.link_times import Points

TOLERANCE = 0.03
_MAX_POINTS = 8


def fit(points: Iterable[tuple[int, float]]) -> Points:
    """Fits a piecewise linear curve to measurements: never falling, with few points.

    Measurements whose sizes agree within 3 % count with their median, because the slope between them would be noise.
    Where a larger message took less time, both get their mean. Then points within 3 % of the line between their
    neighbours are dropped.
    """
    groups: list[list[tuple[int, float]]] = []
    for num_bytes, ms in sorted(points):
        if not groups or num_bytes > groups[-1][0][0] * (1 + TOLERANCE):
            groups.append([])
        groups[-1].append((num_bytes, ms))
    sizes = [max(num_bytes for num_bytes, _ in group) for group in groups]
    medians = [statistics.median(ms for _, ms in group) for group in groups]
    curve = list(zip(sizes, _not_falling(medians), strict=True))
    while len(curve) > 2:
        errors = [_error_without(curve, index) for index in range(1, len(curve) - 1)]
        smallest = min(errors)
        if smallest > TOLERANCE and len(curve) <= _MAX_POINTS:
            break
        del curve[1 + errors.index(smallest)]
    return tuple(curve)


def _not_falling(values: Sequence[float]) -> list[float]:
    """Returns the nearest sequence that never falls: falling neighbours are replaced by their mean."""
    blocks: list[tuple[float, int]] = []
    for value in values:
        mean, count = value, 1
        while blocks and blocks[-1][0] > mean:
            before, number = blocks.pop()
            mean, count = (before * number + mean * count) / (number + count), number + count
        blocks.append((mean, count))
    return [mean for mean, count in blocks for _ in range(count)]


def _error_without(curve: Sequence[tuple[int, float]], index: int) -> float:
    """Returns the relative error at a point if it is left out."""
    (left, left_ms), (here, here_ms), (right, right_ms) = curve[index - 1 : index + 2]
    line_ms = left_ms + (right_ms - left_ms) * (here - left) / (right - left)
    return abs(line_ms - here_ms) / max(here_ms, 1e-9)
