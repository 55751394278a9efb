"""Unions of time intervals: how long something was on its way while nothing else ran."""

from collections.abc import Iterable

Span = tuple[float, float]
"""Start and end, in one unit of time."""


def union(spans: Iterable[Span]) -> list[Span]:
    """The same time as disjoint spans in order; those that touch become one, empty ones vanish."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def length(spans: Iterable[Span]) -> float:
    """Time that at least one of ``spans`` covers."""
    return sum(end - start for start, end in union(spans))


def uncovered(spans: Iterable[Span], others: Iterable[Span]) -> float:
    """Time that ``spans`` cover and ``others`` don't."""
    spans, others = list(spans), list(others)
    return length([*spans, *others]) - length(others)
