"""The time inside ops: in calls that take longer with more tokens, and in calls of the attention's core.

A call counts with its own time, without the calls that it makes.
"""

import re
from bisect import bisect_left
from collections.abc import Sequence

from megatron_lancet.lab.from_trace.events import Event

_LEAST_US = 20.0
"""A shorter one is mostly its own overhead, whatever its tensors' sizes."""
_OVERHEAD = re.compile(r"^autograd::engine|^c10d::|^_AllToAll|Backward$|^_|Function$")
"""Functions written in Python and nodes of autograd: what they do next to their calls does not depend on sizes."""
CORE_NAMES = re.compile(
    r"(?i)bmm|softmax|scaled_dot_product|flash|fused_?attn|dotproductattention|attnfuncwithcp|masked_fill|copyslices"
)


class Leaves:
    """The longer calls of a pass."""

    def __init__(self, ops: Sequence[Event]) -> None:
        found: list[tuple[float, float, float]] = []
        for op in ops:
            is_core = CORE_NAMES.search(op.name) is not None
            for one in op.walk():
                took_us = one.end_us - one.start_us - sum(child.end_us - child.start_us for child in one.children)
                if took_us >= _LEAST_US and not _OVERHEAD.search(one.name):
                    found.append((one.start_us, took_us, took_us if is_core else 0.0))
        self._found = sorted(found)

    def within(self, start_us: float, end_us: float) -> tuple[float, float]:
        """Time of the calls that begin in an interval, and of those in an attention's core."""
        first, last = (bisect_left(self._found, time_us, key=lambda one: one[0]) for time_us in (start_us, end_us))
        inside = self._found[first:last]
        return sum(took for _, took, _ in inside), sum(core for _, _, core in inside)
