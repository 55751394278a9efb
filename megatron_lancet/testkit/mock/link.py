"""The link model of a mocked group: the duration of a message."""

import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """A rank's connection to the others. A message occupies it for latency + bytes / bandwidth.

    Attributes:
        latency_us: latency of every message, in microseconds.
        gbytes_per_s: bandwidth in 1e9 bytes per second, for all bytes sent to other ranks.
    """

    latency_us: float = 0.0
    gbytes_per_s: float = float("inf")

    @classmethod
    def parse(cls, text: str) -> "Link":
        """Parse ``LATENCY_US:GBYTES_PER_S``, for example ``20:25``.

        Raises:
            ValueError: the text has another form, or a figure is out of range.
        """
        latency, colon, bandwidth = text.partition(":")
        try:
            link = cls(float(latency), float(bandwidth))
        except ValueError:
            colon = ""
        if not colon or not (0 <= link.latency_us < float("inf")) or not link.gbytes_per_s > 0:
            raise ValueError(
                f"expected LATENCY_US:GBYTES_PER_S, at least 0 and more than 0, for example 20:25; got {text!r}"
            )
        return link

    def __str__(self) -> str:
        return f"{self.latency_us:g} us, {self.gbytes_per_s:g} GB/s" if self != Link() else "free"

    def time_us(self, num_bytes: float) -> float:
        """Time for which a message of ``num_bytes`` to other ranks occupies the link."""
        return self.latency_us + num_bytes / self.gbytes_per_s * 1e-3


class Queue:
    """Messages of one group, each of which starts when the link is free."""

    def __init__(self) -> None:
        self._free_at_s = 0.0

    def enter(self, duration_us: float) -> float:
        """Queue a message; returns the time at which it completes, by ``time.perf_counter``."""
        self._free_at_s = max(time.perf_counter(), self._free_at_s) + duration_us * 1e-6
        return self._free_at_s
