"""Where time goes inside ops: in calls that take longer with more tokens, and in those of the attention's core."""

import re
from bisect import bisect_left
from collections.abc import Sequence

from megatron_lancet.planning.from_trace.events import Event

_LEAST_US = 20.0
"""A shorter call is mostly its own overhead, whatever its tensors' sizes."""
CORE_NAMES = re.compile(
    r"(?i)bmm|softmax|scaled_dot_product|flash|fused_?attn|dotproductattention|masked_fill|copyslices"
)


class Leaves:
    """Calls that call nothing further, of a pass."""

    def __init__(self, ops: Sequence[Event]) -> None:
        found: list[tuple[float, float, float]] = []
        for op in ops:
            is_core = CORE_NAMES.search(op.name) is not None
            for one in op.walk():
                if not one.children and one.end_us - one.start_us >= _LEAST_US:
                    took_us = one.end_us - one.start_us
                    found.append((one.start_us, took_us, took_us if is_core else 0.0))
        self._found = sorted(found)

    def within(self, start_us: float, end_us: float) -> tuple[float, float]:
        """Time of the calls that begin in an interval, and of those in an attention's core."""
        first, last = (bisect_left(self._found, time_us, key=lambda one: one[0]) for time_us in (start_us, end_us))
        inside = self._found[first:last]
        return sum(took for _, took, _ in inside), sum(core for _, _, core in inside)
