"""Reads off a profiler trace how long messages were on the wire, and how long no kernel of the model ran meanwhile."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.intervals import Span, length, uncovered

_DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of what runs on the device, in the traces that torch.profiler exports."""
_PAUSE = "spin_kernel"
"""Part of the name of the kernel behind ``torch.cuda._sleep``, the mocked group's time on the wire."""
_US_PER_MS = 1e3


@dataclass(frozen=True)
class Communication:
    """Communication of one step.

    Attributes:
        wire_ms: time for which at least one message was on its way.
        exposed_ms: part of it during which no kernel of the model ran.
        idle_ms: time from the first piece of work to the last for which the device had neither: it waited for the host.
    """

    wire_ms: float
    exposed_ms: float
    idle_ms: float


def communication_of(trace: Mapping[str, Any]) -> Communication:
    """Splits the device's work into messages and compute.

    A message is a pause of the mocked link and the piece of work right behind it on the same stream, which moves the
    rows. The stream may be one of messages, or the one that computes, where stock's synchronous collectives are.

    Args:
        trace: of one step, as exported by ``torch.profiler``; times in microseconds.

    Raises:
        ValueError: there is no message in it.
    """
    by_stream: dict[Any, list[tuple[Span, bool]]] = defaultdict(list)
    for event in trace["traceEvents"]:
        if event.get("ph") == "X" and event.get("cat") in _DEVICE_WORK:
            span = event["ts"], event["ts"] + event["dur"]
            by_stream[event["args"]["stream"]].append((span, _PAUSE in event["name"]))
    messages: list[Span] = []
    compute: list[Span] = []
    for pieces in by_stream.values():
        is_behind_pause = False
        for span, is_pause in sorted(pieces):
            (messages if is_pause or is_behind_pause else compute).append(span)
            is_behind_pause = is_pause
    if not messages:
        raise ValueError(
            f"the trace has {sum(map(len, by_stream.values()))} pieces of work on {len(by_stream)} streams, but no "
            f"{_PAUSE}: no message of a mocked link was recorded. Was the link free?"
        )
    work = [*messages, *compute]
    whole = (min(start for start, _ in work), max(end for _, end in work))
    return Communication(
        wire_ms=length(messages) / _US_PER_MS,
        exposed_ms=uncovered(messages, compute) / _US_PER_MS,
        idle_ms=uncovered([whole], work) / _US_PER_MS,
    )
