"""The parts of the check on a GPU, in the order of their value. Neither torch nor Megatron.

Each part is a module of ``part/`` with ``run(record, place)``, and runs in a process of its own: an error on a
device leaves its process without one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter


@dataclass(frozen=True)
class Part:
    """A part of the check.

    Attributes:
        title: what it shows, for readers.
        limit_s: time after which it is stopped, in seconds.
        has_times: whether its times count, so that nothing may run beside it.
    """

    name: str
    title: str
    limit_s: float
    has_times: bool = False


TOTAL_LIMIT_S = 585
"""After which nothing runs any more, in seconds: the whole check ends within ten minutes."""

PARTS = (
    Part("machine", "devices, driver and versions", 25, has_times=True),
    Part("smoke", "each path of the code once, and how often the host waits for the device", 90),
    Part("gradients", "gradients of each plan against stock, three times", 130),
    Part("ranks", "two or more ranks over NCCL", 90),
    Part("memcheck", "compute-sanitizer on one step", 90),
    Part("link", "the modelled link alone, against its formula", 25, has_times=True),
    Part("timing", "steps of each plan in turns", 220, has_times=True),
    Part("graphs", "launch-bound steps with and without CUDA graphs", 70, has_times=True),
    Part("beside", "a GEMM beside a message", 40, has_times=True),
    Part("host_time", "host time of each op", 70, has_times=True),
)


def turns(parts: Sequence[Part]) -> list[list[Part]]:
    """The parts that run at the same time, in their order: those with times run alone."""
    return [
        group
        for has_times, found in groupby(parts, key=attrgetter("has_times"))
        for group in ([[part] for part in found] if has_times else [list(found)])
    ]
