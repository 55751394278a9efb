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
    """

    wire_ms: float
    exposed_ms: float


def communication_of(trace: Mapping[str, Any]) -> Communication:
    """Splits the device's work into messages and compute.

    A stream on which the mocked link pauses is a group's own, and carries its messages and nothing else.

    Args:
        trace: of one step, as exported by ``torch.profiler``; times in microseconds.

    Raises:
        ValueError: there is no message in it.
    """
    by_stream: dict[Any, list[Span]] = defaultdict(list)
    with_messages = set()
    for event in trace["traceEvents"]:
        if event.get("ph") != "X" or event.get("cat") not in _DEVICE_WORK:
            continue
        stream = event["args"]["stream"]
        by_stream[stream].append((event["ts"], event["ts"] + event["dur"]))
        if _PAUSE in event["name"]:
            with_messages.add(stream)
    if not with_messages:
        raise ValueError(
            f"the trace has {sum(map(len, by_stream.values()))} pieces of work on {len(by_stream)} streams, but no "
            f"{_PAUSE}: no message of a mocked link was recorded. Was the link free?"
        )
    messages = [span for stream in with_messages for span in by_stream[stream]]
    compute = [span for stream, spans in by_stream.items() if stream not in with_messages for span in spans]
    return Communication(length(messages) / _US_PER_MS, uncovered(messages, compute) / _US_PER_MS)
