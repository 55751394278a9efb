"""Distributes overlapping spans over levels."""

import heapq
from collections.abc import Sequence

from megatron_lancet.schedule.timeline import Span


def levels(spans: Sequence[Span]) -> list[int]:
    """Returns the lowest level, from 0, on which each span overlaps no earlier one: [num_spans].

    This takes no more levels than there are spans at one time.

    Args:
        spans: spans ordered by start.
    """
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    chosen = []
    for span in spans:
        while busy and busy[0][0] <= span.start_ms:
            heapq.heappush(free, heapq.heappop(busy)[1])
        level = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (span.end_ms, level))
        chosen.append(level)
    return chosen
