"""Piecewise-linear curves through measured points."""

from bisect import bisect_left
from collections.abc import Iterable


class Curve:
    """A curve through measured points that continues beyond the last with the last slope.

    Below the first point it continues with the first slope, but not below zero. A single point gives a line through
    the origin.
    """

    def __init__(self, points: Iterable[tuple[float, float]], flat_below: bool = False) -> None:
        """
        Args:
            points: (x, y), at least one; the y of equal x are averaged.
            flat_below: whether the curve is constant below the first point, as a message's time is (latency).
        """
        by_x: dict[float, list[float]] = {}
        for x, y in points:
            by_x.setdefault(x, []).append(y)
        assert by_x, "a curve has at least one point"
        self._xs = sorted(by_x)
        self._ys = [sum(by_x[x]) / len(by_x[x]) for x in self._xs]
        self._flat_below = flat_below

    def at(self, x: float) -> float:
        """The value at ``x``, at least 0."""
        xs, ys = self._xs, self._ys
        if self._flat_below and x <= xs[0]:
            return ys[0]
        if len(xs) == 1:
            return ys[0] * x / xs[0] if xs[0] > 0 else ys[0]
        right = min(max(bisect_left(xs, x), 1), len(xs) - 1)
        if xs[right] == x:
            return ys[right]
        slope = (ys[right] - ys[right - 1]) / (xs[right] - xs[right - 1])
        return max(ys[right - 1] + slope * (x - xs[right - 1]), 0.0)
