"""CUDA events of a device with a clock that the test sets; counts what the host asks of it."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch


class FakeDevice:
    """Replaces ``torch.cuda``'s events for the length of a test.

    Attributes:
        now_ms: the device's time at which the next event is recorded.
        counts: calls by kind: record, wait (of a stream), query, synchronize (the host waits), elapsed.
        log: ``wait`` for each time that the host waits, next to what the test adds.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ms = 0.0
        self.counts: Counter[str] = Counter()
        self.log: list[str] = []
        self._num_reached = 0
        stream = SimpleNamespace(wait_event=lambda event: self.counts.update(["wait"]))
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing=False: _Event(self))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: self.reach(self.counts["record"]))

    def reach(self, number: int) -> None:
        """The host waits until the device has reached the first ``number`` recorded events."""
        self.counts["synchronize"] += 1
        self.log.append("wait")
        self._num_reached = max(self._num_reached, number)

    def has_reached(self, number: int) -> bool:
        """Whether the host has seen the device reach this event, counted from 1."""
        return number <= self._num_reached


class _Event:
    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self._number = 0
        self.at_ms = 0.0

    def record(self) -> None:
        self._device.counts["record"] += 1
        self._number = self._device.counts["record"]
        self.at_ms = self._device.now_ms

    def query(self) -> bool:
        self._device.counts["query"] += 1
        return self._device.has_reached(self._number)

    def synchronize(self) -> None:
        self._device.reach(self._number)

    def elapsed_time(self, end: "_Event") -> float:
        self._device.counts["elapsed"] += 1
        for event in (self, end):
            assert self._device.has_reached(event._number), "torch raises: the event has not been reached"
        return end.at_ms - self.at_ms
