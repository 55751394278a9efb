"""The parts of the check on a GPU, in the order of their value. Neither torch nor Megatron.

Each part is a module of ``part/`` with ``run(record, place)``, and runs in a process of its own: an error on a
device leaves its process without one.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """A part of the check.

    Attributes:
        title: what it shows, for readers.
        limit_s: time after which it is stopped, in seconds.
    """

    name: str
    title: str
    limit_s: float


TOTAL_LIMIT_S = 585
"""After which nothing runs any more, in seconds: the whole check ends within ten minutes."""

PARTS = (
    Part("machine", "devices, driver and versions", 25),
    Part("smoke", "each path of the code once, and how often the host waits for the device", 60),
    Part("link", "the modelled link alone, against its formula", 25),
    Part("gradients", "gradients of each plan against stock, three times", 100),
    Part("timing", "steps of each plan in turns", 190),
    Part("ranks", "two or more ranks over NCCL", 70),
    Part("beside", "a GEMM beside a message", 40),
    Part("host_time", "host time of each op", 30),
    Part("memcheck", "compute-sanitizer on one step", 60),
)
