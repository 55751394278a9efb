"""Where overlapping spans are drawn."""

import heapq
from collections.abc import Sequence

from megatron_lancet.schedule.timeline import Span


def levels(spans: Sequence[Span]) -> list[int]:
    """The lowest level, from 0, on which each span overlaps none of those before it: [num_spans].

    As many levels are used as spans overlap at one time, no more.

    Args:
        spans: ordered by start.
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
